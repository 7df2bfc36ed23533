"""`hpctrain launch` with real mpirun: exit codes, signals, emulated nodes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks_launcher import Launched, is_open_mpi, launcher_name, run_command, start_command
from tests.states import is_alive, wait_for

pytestmark = [pytest.mark.launches, pytest.mark.cold]

STARTER = "mpirun" if is_open_mpi() else "mpiexec.hydra"
LAUNCH = [sys.executable, "-m", "hpctrain.cli.launch"]  # the root of the commands loads torch: slower


def launch_argv(num_ranks: int, behaviour: str, directory: Path, *options: str) -> list[str]:
    rank = [sys.executable, "-m", "tests.ranks.launch.launch_rank", behaviour, str(directory)]
    return [*LAUNCH, "-n", str(num_ranks), *options, "--", *rank]


def ranks_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]


def start(num_ranks: int, behaviour: str, directory: Path) -> Launched:
    """A launch whose ranks have all started."""
    launched = start_command(None, launch_argv(num_ranks, behaviour, directory))
    try:
        wait_for(lambda: len(ranks_of(directory)) == num_ranks)
    except AssertionError:
        launched.kill()
        raise
    return launched


def test_the_exit_code_is_passed_on_and_emulated_nodes_are_seen(tmp_path: Path) -> None:
    argv = launch_argv(3, "fail", tmp_path, "--ranks-per-node", "2")
    result = run_command(None, argv, env={"OMP_NUM_THREADS": ""}, expect=7)
    ranks = ranks_of(tmp_path)
    assert [(r["launcher"], r["rank"], r["num_ranks"]) for r in ranks] == [
        (launcher_name(), n, 3) for n in range(3)
    ]
    assert [r["node_name"].rpartition("/")[2] for r in ranks] == ["0", "0", "1"]
    assert [(r["local_rank"], r["local_size"], r["emulated"]) for r in ranks] == [
        (0, 2, True),
        (1, 2, True),
        (0, 1, True),
    ]
    assert {r["omp"] for r in ranks} == {str(max(1, len(os.sched_getaffinity(0)) // 3))}
    assert f"{STARTER} -n 3" in result.stderr
    assert "HPCTRAIN_RANKS_PER_NODE=2" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_every_rank_as_sigusr1_and_ends_with_75(
    tmp_path: Path, number: signal.Signals
) -> None:
    with start(3, "wait", tmp_path) as launched:
        launched.process.send_signal(signal.SIGUSR2)  # passed on as it is, and stops nothing
        wait_for(lambda: len(list(tmp_path.glob("SIGUSR2-*"))) == 3)
        launched.process.send_signal(number)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 75, result.stderr
    got = [json.loads((tmp_path / f"got-{rank}.json").read_text()) for rank in range(3)]
    assert got == [["SIGUSR2", "SIGUSR1"]] * 3
    assert "stopped early: the same command resumes" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_program_that_handles_no_stop_ends_with_the_code_of_the_signal(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with start(2, "plain", tmp_path) as launched:
        launched.process.send_signal(number)
        result = launched.wait(timeout_s=300)
    assert result.returncode == code, result.stderr
    assert (
        "the program does not handle SIGUSR1, which asks it to save and stop, and ended unsaved"
        in result.stderr
    )
    assert "was ended by signal" not in result.stderr


def test_a_rank_killed_by_a_signal_is_named(tmp_path: Path) -> None:
    result = run_command(None, launch_argv(3, "die", tmp_path), expect=137)
    assert "rank 1 on" in result.stderr
    assert "signal 9 (SIGKILL" in result.stderr
    assert result.wall_s < 150  # the other ranks would wait for 300 s
    assert not any(is_alive(r["pid"]) for r in ranks_of(tmp_path))


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    with start(2, "stubborn", tmp_path) as launched:
        launched.process.send_signal(signal.SIGINT)
        wait_for(lambda: "asking the ranks to save" in launched.stderr)
        time.sleep(0.5)
        assert all(is_alive(r["pid"]) for r in ranks_of(tmp_path))
        launched.process.send_signal(signal.SIGINT)
        result = launched.wait(timeout_s=300)
    assert result.returncode != 0
    assert not any(is_alive(r["pid"]) for r in ranks_of(tmp_path))


@pytest.mark.parametrize("victim", ["hpctrain launch", "mpirun"])
def test_no_rank_outlives_what_started_it(tmp_path: Path, victim: str) -> None:
    with start(2, "wait", tmp_path) as launched:
        ranks = [r["pid"] for r in ranks_of(tmp_path)]
        launch = launched.process.pid
        mpirun = int(Path(f"/proc/{launch}/task/{launch}/children").read_text().split()[0])
        # Open MPI 5's mpirun becomes prterun.
        assert any(name in Path(f"/proc/{mpirun}/cmdline").read_text() for name in (STARTER, "prterun"))
        os.kill(launched.process.pid if victim == "hpctrain launch" else mpirun, signal.SIGKILL)
        result = launched.wait(timeout_s=300)
        wait_for(lambda: not any(is_alive(pid) for pid in [mpirun, *ranks]), timeout_s=100)
    assert result.returncode == (-9 if victim == "hpctrain launch" else 137)


def test_a_dry_run_prints_a_line_that_a_shell_can_run(tmp_path: Path) -> None:
    words = ["bash", "-c", 'touch "$0/ran as ${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"', str(tmp_path)]
    line = run_command(None, [*LAUNCH, "-n", "2", "--dry-run", "--", *words], expect=0).stdout
    assert f"{STARTER} -n 2" in line
    assert not list(tmp_path.iterdir())
    run_command(None, ["bash", "-c", line], expect=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ran as 0", "ran as 1"]


def test_a_launch_that_cannot_be_ends_with_5_and_a_remedy() -> None:
    argv = [sys.executable, "-m", "hpctrain.cli.main", "launch", "-n", "2", "--", "no-such-program"]
    result = run_command(None, argv, expect=5)
    assert "'no-such-program', is not an executable program" in result.stderr
    assert "Traceback" not in result.stderr
