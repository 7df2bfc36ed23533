"""`python -m benchmarks.start` with real ranks, few of them, and the processor time of a command's processes."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.start import paths
from benchmarks.start.runs import CLIENTS, RANKS, SERVER
from tests.ranks_launcher import run_command

pytestmark = pytest.mark.launches


def measured(figures: str, directory: Path) -> dict[str, Any]:
    """Returns what a quick run of some figures has written."""
    output = directory / "start.json"
    argv = [sys.executable, "-m", "benchmarks.start", "--quick", "--only", figures, "--output", str(output)]
    run_command(None, argv, timeout_s=600, expect=0)
    content: dict[str, Any] = json.loads(output.read_text())
    return content


def test_all_ways_of_a_start_are_timed_and_give_the_same_results(tmp_path: Path) -> None:
    content = measured("5", tmp_path)
    records = {record["id"]: record for record in content["records"]}
    assert list(records) == ["start.1.nothing.2", "start.1.up.2", "start.5"]
    compared = records["start.5"]["samples"]["2"]
    assert compared["differing"] == []
    assert (compared["runs"], compared["records"]) == (3, 2 * 23 + 2)
    for kind in ("nothing", "up"):
        samples = records[f"start.1.{kind}.2"]["samples"]
        assert len(samples["without_s"]) == len(samples["forked_s"]) == 1
    assert content["seed"] == 37
    assert len(content["load"]) == 2


@pytest.mark.thorough
def test_processor_time_paths_and_memory_are_measured(tmp_path: Path) -> None:
    content = measured("2,4" if paths.why_not() else "2,3,4", tmp_path)
    records = {record["id"]: record["samples"] for record in content["records"]}
    for end, kind in itertools.product(("init", "left"), ("without", "nothing")):
        assert set(records["start.2"]["cpu_s"][end][kind]) == {"1", "2"}
        assert records["start.2"]["cpu_s"][end][kind]["1"][0] > 0
    without, forked = content["figures"]["start.2"]["started"]["2 ranks"]
    assert without["ranks"] == forked["ranks"]  # the same cores, threads and variables
    (memory,) = records["start.4"]["nothing"]
    assert memory["numbers"] == {RANKS: 2, CLIENTS: 2, SERVER: 1}
    assert records["start.4"]["without"][0]["numbers"] == {RANKS: 2}
    if "start.3" in records:
        counts = {kind: found["2"]["by_process"] for kind, found in records["start.3"].items()}
        # Without a server two processes have imported everything, with one it alone.
        assert counts["without"][1] > counts["without"][0] / 2
        assert counts["nothing"][1] < counts["nothing"][0] / 2
