"""The scripts in slurm/ on a real Slurm cluster. train.sbatch is run in test_slurm.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.training_jobs import RECIPE, STOPPED, output, trains, wait_for
from tests.ranks_launcher import REPOSITORY

pytestmark = pytest.mark.launches

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sbatch"))
SMALL = ["--nodes=1", "--ntasks-per-node=1"]


def script(name: str) -> str:
    return str(REPOSITORY / "slurm" / f"{name}.sbatch")


def finishes(cluster: Cluster, job: int, *, folder: Path) -> None:
    end = cluster.wait_for(job, timeout_s=300)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_takes_the_script(cluster: Cluster, path: Path) -> None:
    done = cluster.run(["sbatch", "--test-only", "--cpus-per-task=1", str(path), RECIPE], timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def test_scripts_that_need_nothing_special_train(cluster: Cluster, folder: Path) -> None:
    """Arrays of seeds and of hyper-parameters; and the one for GPUs, where the nodes only claim to have some."""
    jobs = {}
    for name in ("seeds", "sweep", "gpu"):
        where = folder / name
        where.mkdir()
        (where / "data").symlink_to(folder / "data")
        array = [] if name == "gpu" else ["--array=0-1"]
        words = [*SMALL, "--cpus-per-task=1", *array, script(name), RECIPE, "--set", "run.epochs=1"]
        jobs[name] = cluster.submit(words, cwd=where)

    def runs(name: str) -> list[Path]:
        return [
            folder / name / "runs" / "digits" / task
            for task in ([""] if name == "gpu" else ["task-0", "task-1"])
        ]

    for name, job in jobs.items():
        wait_for(
            lambda name=name: all((run / "summary.json").exists() for run in runs(name)), folder=folder / name
        )
        cluster.wait_for(job, timeout_s=300)
    for name, key in (("seeds", "seed"), ("sweep", "weight_decay")):
        recipes = [(run / "recipe.toml").read_text().splitlines() for run in runs(name)]
        assert len({line for recipe in recipes for line in recipe if line.startswith(f"{key} = ")}) == 2
    found = json.loads((runs("gpu")[0] / "environment.json").read_text())
    assert found["variables"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_a_preempted_job_saves_and_comes_back(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit([*SMALL, script("preemptible"), RECIPE, *STOPPED], cwd=folder)
    wait_for(trains(folder), folder=folder)
    # Jobs of the other partition need all cores of the cluster for a moment.
    urgent = cluster.submit(["--nodes=4", "--exclusive", "--wrap", "sleep 1"], cwd=folder)
    wait_for(lambda: "queueing it again" in output(folder), folder=folder, timeout_s=300)
    assert cluster.wait_for(urgent, timeout_s=300).state == "COMPLETED"
    finishes(cluster, job, folder=folder)
    assert "stopped after step" in output(folder)
    assert "start 2: 1 ranks" in output(folder)
    assert "resumed from" in output(folder)


@pytest.mark.thorough  # test_slurm_commands.py: a job that `hpctrain slurm submit` has written
def test_a_chain_goes_on_in_a_successor(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit([script("chain"), RECIPE, *STOPPED, "--resume", "never"], cwd=folder)
    wait_for(trains(folder), folder=folder)
    assert cluster.run(["scancel", "--batch", "--signal=USR1", str(job)], timeout_s=300).returncode == 0
    end = cluster.wait_for(job, timeout_s=300)
    assert (end.exit_code, end.num_restarts) == (75, 0), output(folder)
    printed = output(folder)
    successor = int(printed.partition("stopped with the state saved; job ")[2].split()[0])
    finishes(cluster, successor, folder=folder)
    assert f"job {successor}: start 2: 4 ranks" in output(folder)


def test_mpirun_stops_with_the_state_saved(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit([script("mpirun"), RECIPE, *STOPPED], cwd=folder)
    wait_for(trains(folder), folder=folder)
    found = json.loads((folder / "runs" / "digits" / "environment.json").read_text())
    assert found["launcher"] == "Open MPI"
    assert found["ranks_by_node"] == [[0, 1], [2, 3]]
    assert cluster.run(["scancel", "--batch", "--signal=USR1", str(job)], timeout_s=300).returncode == 0
    wait_for(lambda: "queueing it again" in output(folder), folder=folder, timeout_s=300)
    assert "stopped after step" in output(folder)
    assert cluster.run(["scancel", str(job)], timeout_s=300).returncode == 0


@pytest.mark.thorough  # test_scaling.py, without the script
def test_scaling_is_measured_in_one_job(cluster: Cluster, folder: Path) -> None:
    quick = ["--steps", "3", "--warmup-steps", "1", "--at-most", "1"]
    job = cluster.submit(["--ntasks-per-node=1", script("scaling"), RECIPE, *quick], cwd=folder)
    finishes(cluster, job, folder=folder)
    measured = json.loads((folder / "scaling-digits-strong.json").read_text())
    assert sorted(run["ranks"] for run in measured["runs"]) == [1, 2]
