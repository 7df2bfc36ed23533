"""`python -m benchmarks.parallel --quick` with real ranks: what depends on no time must hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel.layouts import LAYOUTS, timed_methods
from benchmarks.parallel.planned.runs import WAYS
from tests.ranks_launcher import run_command

pytestmark = pytest.mark.launches


def measured(tmp_path: Path, figures: str) -> dict[str, dict[str, Any]]:
    """The records by id."""
    output = tmp_path / "parallel.json"
    argv = [
        sys.executable,
        "-m",
        "benchmarks.parallel",
        "--quick",
        "--only",
        figures,
        "--output",
        str(output),
    ]
    run_command(None, argv, timeout_s=800, expect=0)
    content = json.loads(output.read_text())
    assert all("started" in entry for entry in content["figures"].values())
    return {record["id"]: record for record in content["records"]}


def test_every_layout_equals_one_process_and_loads_every_other(tmp_path: Path) -> None:
    records = measured(tmp_path, "1,6")
    trained = [
        f"parallel.1.{workload}.{name}" for workload in ("language", "convolution") for name in LAYOUTS
    ]
    assert list(records) == [*trained, "parallel.6.bits.2", "parallel.6.loss.2", "parallel.6.dcp"]
    assert [name for name, record in records.items() if not record["holds"]] == []
    assert len(records["parallel.6.bits.2"]["samples"]) == len(LAYOUTS) ** 2


@pytest.mark.thorough
def test_memory_and_steps_of_every_method_are_measured(tmp_path: Path) -> None:
    records = measured(tmp_path, "2,4")
    on_one_node = [name for name, layout in LAYOUTS.items() if not layout.nodes]
    memory = [f"parallel.2.{name}.2" for name in on_one_node]
    assert list(records) == [
        *memory,
        *(f"parallel.2.plan.{way}" for way in WAYS),
        *(f"parallel.4.1x2.{name}" for name in ("best", "best-16", *on_one_node)),
    ]
    # A small model: what does not grow with it counts too.
    assert all(record["value"] < 0.5 for name, record in records.items() if name in memory)
    assert set(records["parallel.4.1x2.best"]["samples"]) == set(timed_methods(several_nodes=False))
