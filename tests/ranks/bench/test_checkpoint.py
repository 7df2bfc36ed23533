"""`hpctrain bench checkpoint`, and the cases of its benchmark, with real ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import h5py
import pytest

from benchmarks.places import OneNode
from tests.ranks_launcher import run_command, start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches

BENCH = [sys.executable, "-m", "hpctrain.cli.main", "bench", "checkpoint", "--backend", "mpi"]


def test_two_ranks_measure_every_way_and_leave_nothing(tmp_path: Path) -> None:
    disk, path = tmp_path / "disk", tmp_path / "found.json"
    disk.mkdir()
    argv = [*BENCH, "--directory", str(disk), "--json", str(path), "--engines", "direct,auto"]
    argv += ["--size", "1MiB", "--tensors", "7", "--repeats", "2"]
    result = run_command(2, argv, expect=0)
    document = json.loads(path.read_text())
    assert document["topology"] == "1 node x 2 ranks"
    assert sum(document["rank_bytes"]) == document["bytes"] == 1 << 20
    ways = {way["what"]: way for way in document["ways"]}
    assert set(ways) == {
        "raw write", "raw read", "memcpy", "load, verified", "save, direct", "save, auto", "save in a run, direct",
        "save in a run, auto", "save async, direct", "save async, auto",
    }  # fmt: skip
    for name, way in ways.items():
        assert len(way["samples_s"]) == 2
        assert name in result.stdout
        assert (way["stall_of_memcpy"] is not None) == ("async" in name)
        for stall, whole in zip(way["stall_samples_s"], way["samples_s"], strict=False):
            assert 0 < stall <= whole
    assert ways["save, direct"]["engine"] == "direct"
    assert list(disk.iterdir()) == []


def test_a_stop_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    argv = [*BENCH, "--directory", str(tmp_path), "--size", "1MiB", "--repeats", "100000"]
    with start_command(2, argv) as launched:
        wait_for(lambda: list(tmp_path.glob("*/*")), launched=launched)
        for pid in launched.rank_processes().values():
            os.kill(pid, signal.SIGUSR1)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 130, result.stderr
    assert "stopped; nothing was written" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_peers_load_what_they_saved_and_steps_go_on_beside_a_save(tmp_path: Path) -> None:
    names = ["dcp", "dcp, no fsync", "torch.save", "safetensors"]
    names += ["h5py mpio"] if h5py.get_config().mpi else []  # parallel h5py is optional
    limits = {"free": None, "dcp async": None}
    asked = {
        "num_bytes": 1 << 20,
        "num_tensors": 4,
        "warmup": 0,
        "repeats": 1,
        "seed": 0,
        "cold": False,
        "touched_bytes": 1 << 20,
    }
    place = OneNode("benchmarks.checkpoint.ranks")
    loads = place.run("loads", {**asked, "peers": names}, timeout_s=300, scratch=tmp_path)
    assert set(loads) == {"raw read", "load, verified", *names}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in loads.values())
    steps = place.run("steps", {**asked, "limits": limits}, timeout_s=300, scratch=tmp_path)
    assert set(steps) == set(limits)
    for rounds in steps.values():
        (one,) = rounds
        assert len(one["quiet"]) == 12
        assert len(one["beside"]) >= 1
        assert sum(one["beside"]) <= one["save"]
    assert list(tmp_path.iterdir()) == []
