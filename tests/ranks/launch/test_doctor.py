"""`hpctrain doctor` alone and under real mpirun: one report, differences named, and no hang."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks_launcher import (
    REPOSITORY,
    CommandResult,
    is_open_mpi,
    launcher_name,
    run_command,
    variables_of_another_mpi,
)

pytestmark = [pytest.mark.launches, pytest.mark.cold]

DOCTOR = [sys.executable, "-m", "hpctrain.cli.doctor"]
MPIRUN = ["mpirun", *(["--oversubscribe", "--bind-to", "none"] if is_open_mpi() else [])]
RANK = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"


def with_another(rank: int, begin: str, argv: list[str]) -> list[str]:
    """The command, before which this rank alone runs `begin`: Debian's mpirun 5.0.7 crashes with two programs."""
    return ["sh", "-c", f'if [ "{RANK}" = {rank} ]; then {begin}; fi; exec "$@"', "sh", *argv]


def broken(directory: Path, *packages: str) -> str:
    """A place for PYTHONPATH in which these packages are installed and broken."""
    for package in packages:
        (directory / package).mkdir(parents=True)
        (directory / package / "__init__.py").write_text('raise ImportError("built for another machine")\n')
    return str(directory)


def report_of(result: CommandResult) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout)  # fails when more than one rank printed
    return report


def test_alone_it_reports_and_ends_with_0() -> None:
    result = run_command(None, [*DOCTOR, "--json"], expect=0)
    report = report_of(result)
    assert report["level"] in ("ok", "warning")
    assert {
        "python",
        "torch",
        "MPI",
        "Horovod",
        "HDF5",
        "launcher",
        "topology",
        "cores",
        "run directory",
    } <= {finding["topic"] for finding in report["findings"]}
    assert report["ranks"][0]["mpi"]["thread_level"] == "multiple"
    assert report["ranks"][0]["launcher"]["num_ranks"] == 1


def test_alone_a_problem_ends_with_5_and_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"PYTHONPATH": broken(tmp_path / "modules", "mpi4py")}
    result = run_command(
        None, [*DOCTOR, "--run-directory", str(tmp_path / "file" / "x")], env=environ, expect=5
    )
    assert "problem" in result.stdout
    assert "--run-directory" in result.stdout
    assert "built for another machine" in result.stdout


def test_ranks_are_merged_into_one_report_and_differences_named(tmp_path: Path) -> None:
    # Rank 2 has another environment, as on a node that was set up differently.
    other = f"export PYTHONPATH={broken(tmp_path, 'h5py')}:$PYTHONPATH OMP_NUM_THREADS=2"
    doctor = with_another(2, other, [*DOCTOR, "--json"])
    result = run_command(None, [*MPIRUN, "-n", "3", *doctor], expect=5)
    report = report_of(result)
    problems = [finding["text"] for finding in report["findings"] if finding["level"] == "problem"]
    warnings = [finding["text"] for finding in report["findings"] if finding["level"] == "warning"]
    assert len(report["ranks"]) == 3
    assert any(text.startswith("rank 2 (") and "built for another machine" in text for text in problems)
    assert any("missing on rank 2" in text and "on ranks 0-1" in text for text in problems)
    assert any("1 on ranks 0-1" in text and "2 on rank 2" in text for text in warnings)


def test_ranks_without_any_library_to_meet_through_each_tell_their_own(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": broken(tmp_path, "mpi4py", "horovod")}
    result = run_command(2, DOCTOR, env=environ, expect=5)
    assert result.stdout == ""
    assert "rank 0 on" in result.stderr
    assert "problem: communication" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_launcher_of_another_mpi_is_reported_and_not_taken_for_many_ranks() -> None:
    # Such as what MPICH's mpiexec gives its ranks, while the MPI library here is Open MPI: each rank is alone. The same
    # happens in a container whose MPI does not understand the launcher outside.
    environ = variables_of_another_mpi(rank=1, num_ranks=4)
    result = run_command(None, DOCTOR, env={**environ, "APPTAINER_CONTAINER": "/a.sif"}, expect=5)
    assert "rank 1 of 4" in result.stderr
    assert "The MPI library in the container /a.sif does not understand the launcher" in result.stderr
    assert "each of the 4 ranks sees a world of one" in result.stderr


def test_ranks_whose_container_lets_no_variables_in_learn_that_they_are_not_alone(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("this process may not make a mount namespace")
    # As `apptainer exec --cleanenv`, whose runtime stays outside of the container as the parent.
    kept = [f"PATH={os.environ['PATH']}", f"PYTHONPATH={REPOSITORY}", "APPTAINER_CONTAINER=/a.sif"]
    inside = shlex.join(["unshare", "--mount", "env", "-i", *kept, *DOCTOR, "--json"])
    run_command(2, ["sh", "-c", f"{inside} > {tmp_path}/{RANK}; sleep 2; exit 5"], expect=5)
    for rank in range(2):
        findings = json.loads((tmp_path / str(rank)).read_text())["findings"]
        (finding,) = (finding for finding in findings if finding["topic"] == "launcher")
        assert finding["level"] == "problem"
        assert "no launcher's variables are set in the container /a.sif" in finding["text"]
        assert f"{launcher_name()} started this process as rank {rank} of 2" in finding["text"]


def test_ranks_that_never_come_are_not_waited_for_for_ever() -> None:
    argv = [*MPIRUN, "-n", "2", *with_another(1, "exec sleep 60", [*DOCTOR, "--timeout-s", "4"])]
    result = run_command(None, argv, timeout_s=300, expect=5)
    assert "the ranks did not connect" in result.stderr
    assert "no answer within 4 s" in result.stderr
    assert ": torch: " in result.stderr
