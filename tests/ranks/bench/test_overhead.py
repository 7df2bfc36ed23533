"""`python -m benchmarks.overhead` with real ranks, a few steps of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ranks_launcher import run_command

pytestmark = pytest.mark.launches


def test_it_measures_each_part_and_writes_what_it_found(tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    argv = [sys.executable, "-m", "benchmarks.overhead", "--quick", "--only", "1", "--output", str(output)]
    run_command(None, argv, timeout_s=300, expect=0)
    content = json.loads(output.read_text())
    records = {record["id"]: record for record in content["records"]}
    assert list(records) == [f"overhead.{figure}{part}" for figure in "12" for part in "abcd"]
    every = records["overhead.1d"]["samples"]
    assert [len(block) for block in every["step_s"]] == [5, 5]
    assert all(seconds > 0 for block in every["without_s"] for seconds in block)
    assert len(every["windows"]["stragglers"]) == 5
    assert content["figures"]["overhead.1"]["started"]["all"][0]["ranks"][0]["ranks"] == [0, 1]
