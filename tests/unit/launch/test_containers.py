"""Launchers' variables that do not reach a container: what is outside is read as far as the container allows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.launch.rank_identity.containers import (
    Ancestor,
    Surroundings,
    read_surroundings,
    why_not_alone,
)
from tests.unit.launch.test_identity import recorded

IMAGE = "the container /images/train.sif"
SHELL = Ancestor(environ={"HOME": "/root"}, in_container=True)


def outside(name: str) -> Ancestor:
    return Ancestor(environ=recorded(name), in_container=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slurm-step", "Slurm started this process as rank 2 of 3"),
        ("open-mpi-4", "Open MPI started this process as rank 1 of 4"),
        ("cray-pals-pmix", "Cray PALS started this process as rank 5 of several"),
    ],
)
def test_variables_that_end_at_the_containers_border_are_missed(name: str, words: str) -> None:
    around = Surroundings(container=IMAGE, ancestors=(SHELL, outside(name), outside("slurm-batch-shell")))
    reason = why_not_alone({"HOME": "/root"}, around)
    assert reason is not None
    assert words in reason
    assert f"no launcher's variables are set in {IMAGE}" in reason
    assert "without --cleanenv" in reason


@pytest.mark.parametrize(
    ("environ", "ancestors"),
    [
        pytest.param(recorded("slurm-step"), (outside("slurm-step"),), id="variables are let in"),
        pytest.param({}, (), id="nothing can be seen"),
        pytest.param({}, (SHELL, outside("slurm-batch-shell")), id="a job without a step"),
        pytest.param({}, (outside("slurm-one-task-step"),), id="a step of one task"),
        pytest.param(
            {},
            (Ancestor(environ=recorded("slurm-step"), in_container=True), outside("slurm-step")),
            id="removed inside the container, on purpose",
        ),
    ],
)
def test_a_process_that_is_alone_or_cannot_know_is_left_alone(
    environ: dict[str, str], ancestors: tuple[Ancestor, ...]
) -> None:
    assert why_not_alone(environ, Surroundings(container=IMAGE, ancestors=ancestors)) is None


def test_several_tasks_of_a_launchers_program_that_this_user_may_not_look_into_are_counted() -> None:
    stepd = Ancestor(name="slurmstepd", num_tasks=4)
    reason = why_not_alone(
        {}, Surroundings(container=IMAGE, ancestors=(Ancestor(name="starter-suid"), stepd))
    )
    assert reason is not None
    assert "outside of it slurmstepd started 4 processes on this node" in reason
    assert why_not_alone({}, Surroundings(ancestors=(stepd,))) is None  # outside of containers: on purpose
    alone = Ancestor(name="slurmstepd", num_tasks=1)
    assert why_not_alone({}, Surroundings(container=IMAGE, ancestors=(alone,))) is None


@pytest.mark.parametrize(
    "path", ["/slurm/uid_0/job_5/step_0/task_2", "/system.slice/slurmstepd.scope/job_5/step_0/user/task_2"]
)
def test_a_later_task_of_a_step_is_known_by_its_control_group(path: str) -> None:
    cgroups = f"0::{path}\n"
    reason = why_not_alone({}, Surroundings(container=IMAGE, cgroups=cgroups))
    assert reason is not None
    assert "task 2 of Slurm's step 5.0" in reason
    assert why_not_alone({}, Surroundings(cgroups=cgroups)) is None  # outside of containers: on purpose
    assert (
        why_not_alone({}, Surroundings(container=IMAGE, cgroups=cgroups.replace("task_2", "task_0"))) is None
    )


def test_this_process_sees_its_parents_and_their_variables() -> None:
    around = read_surroundings(os.environ)
    assert around.ancestors[0].environ["PATH"]
    assert around.ancestors[0].in_container


@pytest.mark.parametrize(
    ("environ", "mark", "container"),
    [
        ({"APPTAINER_CONTAINER": "/a.sif", "SINGULARITY_CONTAINER": "/a.sif"}, None, "the container /a.sif"),
        ({"SINGULARITY_CONTAINER": "/b.sif"}, None, "the container /b.sif"),
        ({}, ".dockerenv", "the Docker container"),
        ({}, "run/.containerenv", "the Podman container"),
        ({}, None, ""),
    ],
)
def test_containers_are_known_by_their_marks(
    tmp_path: Path, environ: dict[str, str], mark: str | None, container: str
) -> None:
    if mark is not None:
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).touch()
    assert read_surroundings(environ, root=tmp_path).container == container


def test_a_real_border_of_mounts_hides_variables_and_is_seen_through() -> None:
    """What `apptainer exec --cleanenv` does: a mount namespace of its own, and an empty environment."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "true"], check=False).returncode
    ):
        pytest.skip("this process may not make a mount namespace")
    ask = (
        "import os; from hpctrain.launch import read_surroundings, why_not_alone;"
        "print(why_not_alone(os.environ, read_surroundings(os.environ)))"
    )
    inside = ["env", "-i", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, "-c", ask]
    outside_environ = {**os.environ, **recorded("open-mpi-4")}
    # The shell stays, as the runtime of a container does.
    border = ["sh", "-c", 'unshare --mount "$@"; exit $?', "sh", *inside]
    done = subprocess.run(border, env=outside_environ, capture_output=True, text=True, check=True)
    assert "Open MPI started this process as rank 1 of 4" in done.stdout
    without_border = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *inside],
        env=outside_environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert without_border.stdout == "None\n"
