"""More ranks than cores, as users start them: `hpctrain launch`, plain mpirun, an own script. And their threads."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.launch.yielding import find_yield_library
from tests.ranks_launcher import is_open_mpi, run_command

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(
        find_yield_library() is None, reason="hpctrain/launch/_yield_by_sleep.c was not compiled"
    ),
    pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI yields like this"),
    pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset"),
]
HPCTRAIN = [sys.executable, "-m", "hpctrain.cli.main"]
MPIRUN = ["mpirun", "--oversubscribe", "--mca", "plm", "isolated"]


def on_two_cpus(*command: str | Path) -> list[str]:
    """`command` on two of this machine's CPUs, or on the only one."""
    return ["taskset", "-c", ",".join(map(str, CPUS[:2])), *map(str, command)]


def own_script(backend: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "tests.ranks.comm.crowd_rank", backend, str(directory)]


def found_by_ranks(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]


def test_four_ranks_of_hpctrain_launch_share_two_cores(tmp_path: Path) -> None:
    backend = "horovod" if importlib.util.find_spec("horovod") is not None else "mpi"
    launch = [*HPCTRAIN, "launch", "-n", "4", "--ranks-per-node", "2", "--", *own_script(backend, tmp_path)]
    result = run_command(None, on_two_cpus(*launch), timeout_s=300, expect=0)
    found = found_by_ranks(tmp_path)
    assert [rank["sums"] for rank in found] == [[10.0]] * 4
    assert all(rank["mapped"] for rank in found)
    assert not [note for rank in found for note in rank["notes"] if "share" in note]
    assert f"LD_PRELOAD={find_yield_library()}" in result.stderr


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_two_ranks_of_hpctrain_launch_have_a_core_each_and_preload_nothing(tmp_path: Path) -> None:
    launch = [*HPCTRAIN, "launch", "-n", "2", "--", *own_script("mpi", tmp_path)]
    run_command(None, on_two_cpus(*launch), env={"OMP_NUM_THREADS": ""}, expect=0)
    found = found_by_ranks(tmp_path)
    assert [(rank["mapped"], rank["threads"]) for rank in found] == [(False, 1)] * 2


def test_an_own_script_under_plain_mpirun_gets_a_note_with_the_cure(tmp_path: Path) -> None:
    result = run_command(
        None, on_two_cpus(*MPIRUN, "--bind-to", "none", "-n", "3", *own_script("mpi", tmp_path)), expect=0
    )
    found = found_by_ranks(tmp_path)
    assert [rank["mapped"] for rank in found] == [False] * 3
    (note,) = [note for note in found[0]["notes"] if "share" in note]
    assert "3 ranks share" in note
    assert f"`hpctrain launch`, or set LD_PRELOAD={find_yield_library()} for the ranks" in note
    assert note in result.stdout + result.stderr


def test_hpctrain_under_plain_mpirun_preloads_the_library_by_itself(tmp_path: Path) -> None:
    doctor = [*HPCTRAIN, "doctor", "--backend", "mpi", "--json", "--run-directory", str(tmp_path)]
    result = run_command(None, on_two_cpus(*MPIRUN, "--bind-to", "none", "-n", "3", *doctor))
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert [rank["yielding"]["in_effect"] for rank in report["ranks"]] == [True] * 3
    assert "sleep instead of yielding" in result.stdout


THROUGH_A_SHELL = ["bash", "-c", '"$0" "$@"; exit $?']


@pytest.mark.parametrize(
    ("options", "num_ranks", "expected"),
    [
        pytest.param(["--bind-to", "none"], 3, True, id="not bound"),
        pytest.param(["--bind-to", "core:overload-allowed"], 3, True, id="two on a core"),
        pytest.param(["--bind-to", "core"], min(2, len(CPUS)), False, id="bound to a core each"),
        pytest.param(["--bind-to", "none"], min(2, len(CPUS)), False, id="as many as cores"),
    ],
)
@pytest.mark.parametrize("between", [[], THROUGH_A_SHELL], ids=["", "through a shell"])
def test_a_rank_starts_anew_once_where_ranks_outnumber_cores(
    options: list[str], num_ranks: int, expected: bool, between: list[str]
) -> None:
    rank = [*between, sys.executable, "-m", "tests.ranks.launch.restart_rank", "an argument"]
    result = run_command(None, on_two_cpus(*MPIRUN, *options, "-n", str(num_ranks), *rank), expect=0)
    line = f"an argument: {[expected, '1' if expected else None, False]}"
    assert result.stdout.splitlines() == [line] * num_ranks


@pytest.mark.parametrize(
    ("options", "num_ranks", "num_cpus", "threads"),
    [
        pytest.param(["--bind-to", "none"], 1, 2, 2, id="one rank, not bound"),
        pytest.param(["--bind-to", "core"], 2, 2, 1, id="a core each"),
        pytest.param(["--map-by", "slot:PE=2", "--bind-to", "core"], 2, 4, 2, id="two cores each"),
    ],
)
def test_threads_follow_the_binding(
    tmp_path: Path, options: list[str], num_ranks: int, num_cpus: int, threads: int
) -> None:
    if len(CPUS) < num_cpus:
        pytest.skip(f"needs {num_cpus} CPUs")
    place = ["taskset", "-c", ",".join(map(str, CPUS[:num_cpus]))]
    command = [*place, *MPIRUN, *options, "-n", str(num_ranks), *own_script("mpi", tmp_path)]
    run_command(None, command, env={"OMP_NUM_THREADS": ""}, expect=0)
    assert [rank["threads"] for rank in found_by_ranks(tmp_path)] == [threads] * num_ranks
