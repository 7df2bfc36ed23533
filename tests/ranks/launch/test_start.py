"""Ranks that never start hpctrain, that start it inside a rank, and that exit alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from tests.ranks_launcher import rank_environment, run_command

pytestmark = [pytest.mark.launches, pytest.mark.cold]
RANK = [sys.executable, "-m", "tests.ranks.launch.start_rank"]


def test_ranks_that_never_start_are_named_within_the_limit(tmp_path: Path) -> None:
    done = run_command(4, [*RANK, "absent", "40", str(tmp_path / "left")], expect=6, timeout_s=300)
    assert "started" not in done.stdout
    assert re.search(r"rank [03] on \S+ has waited 35\.0 s at its start .*timeout_s = 40", done.stderr)
    assert re.search(r"rank 1 on \S+ is absent: its process has ended", done.stderr)
    assert re.search(
        r"rank 2 on \S+ is absent: its process \d+ \(.*start_rank absent 40 \S+\) runs", done.stderr
    )
    assert not re.search(r"rank [03] on \S+ is absent", done.stderr)
    assert done.stderr.count("has waited") == 1


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exit", 3),
        pytest.param("raise", 3, marks=pytest.mark.thorough),
        pytest.param("256", 1, marks=pytest.mark.thorough),  # of which the system would keep 0
    ],
)
def test_a_rank_that_exits_alone_ends_all_with_its_code(how: str, code: int) -> None:
    """And before: a rank may come late, start twice, and not start hpctrain in a child."""
    done = run_command(2, [*RANK, "started", how], expect=code, timeout_s=300)
    assert "the child's code is 5" in done.stdout
    assert "the child has started" not in done.stdout
    assert re.search(
        r"hpctrain: this process is not itself rank 0 .*by that rank, process \d+ .*hpctrain\.init\(\)",
        done.stderr,
    )
    assert re.search(
        rf"rank 1 on \S+: the program has exited with code {code} while its session", done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_rank_that_exits_alone_after_mpi4py_was_imported_first_ends_all_with_its_code() -> None:
    done = run_command(2, [*RANK, "mpi4py_first", "3"], expect=3, timeout_s=300)
    assert re.search(r"rank 1 on \S+: the program has exited with code 3 while its session", done.stderr)


@pytest.mark.thorough
def test_a_rank_that_exits_alone_with_code_0_says_that_it_waits() -> None:
    done = run_command(2, [*RANK, "mpi4py_first", "0"], expect=6, timeout_s=300)
    assert re.search(
        r"rank 1 on \S+: the program has exited with code 0 .* and waits for the other", done.stderr
    )


@pytest.mark.thorough
@pytest.mark.skipif(not h5py.get_config().mpi, reason="h5py is not parallel: hpctrain does not need it")
def test_a_parallel_file_that_is_open_when_the_program_ends_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    done = run_command(2, [*RANK, "file_at_exit", str(path)], expect=0, timeout_s=300)
    assert "hpctrain: rank" not in done.stderr
    assert "Error" not in done.stderr
    with h5py.File(path) as file:
        assert file["x"][:].tolist() == [1, 2, 0, 0]


@pytest.mark.thorough
def test_ranks_that_end_without_closing_their_session_end_as_python_does() -> None:
    done = run_command(3, [*RANK, "one_ends", "0"], expect=0, timeout_s=300)
    assert done.stdout.count("ends") == 3
    assert done.stderr.count("hpctrain: rank") == 0


@pytest.mark.thorough
def test_a_child_of_a_rank_that_has_started_mpi_is_refused() -> None:
    done = run_command(2, [*RANK, "child_of_mpi"], timeout_s=300)
    assert re.search(r"was started by that rank, process \d+ .*which has started MPI", done.stderr)
    assert "orte_init" not in done.stderr


@pytest.mark.thorough
def test_a_second_program_of_a_rank_is_told_why_mpi_does_not_start(tmp_path: Path) -> None:
    script = tmp_path / "twice.sh"
    program = "import hpctrain; s = hpctrain.init(timeout_s=100); print('started', s.rank); s.close()"
    script.write_text(f'{sys.executable} -c "{program}"\n{sys.executable} -c "{program}"\n')
    done = run_command(2, ["bash", str(script)], expect=5, timeout_s=300)
    assert done.stdout.count("started") == 2
    assert re.search(
        r"rank \d has already run another program .*but MPI can be started only once", done.stderr
    )
    assert "orte_init" not in done.stderr


SLURM_SHELL = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "extra", "code", "message"),
    [
        ("hpctrain.init(timeout_s=90)", SLURM_SHELL, 5, r"rank 0 of 4 by Slurm's .* MPI reports rank 0 of 1"),
        ("hpctrain.init(ranks=3)", {}, 5, "3 ranks|ranks=3|3"),
        ("hpctrain.init(backend='gloo')", {}, 2, "no communication backend 'gloo'"),
        ("hpctrain.init().open_dataset('/no/such/folder')", {}, 3, "/no/such/folder"),
        ("hpctrain.init(); raise ValueError('of the program')", {}, 1, "ValueError: of the program"),
    ],
)  # fmt: skip
def test_a_script_ends_with_a_message_and_the_documented_code(
    program: str, extra: dict[str, str], code: int, message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import hpctrain; {program}"], env=rank_environment(extra), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr)
    assert ("Traceback" in done.stderr) == (code == 1)
    assert os.path.dirname(__file__) not in done.stderr
