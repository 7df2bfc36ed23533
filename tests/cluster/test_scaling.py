"""`hpctrain bench scaling` on the cluster: 1, 2, 4 and 8 ranks in one allocation, and a job for each run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.training_jobs import RECIPE

pytestmark = pytest.mark.launches

TINY = ["--steps", "3", "--warmup-steps", "1"]
SCALING = ["hpctrain", "bench", "scaling", RECIPE, *TINY]


def test_a_sweep_over_1_2_4_and_8_ranks_in_one_allocation(cluster: Cluster, folder: Path) -> None:
    path = folder / "scaling.json"
    sizes = ["--ranks", "1,2,4,8", "--ranks-per-node", "2", "--at-most", "2"]
    sizes += ["--json", str(path), "--report", "report.html"]
    done = cluster.run(
        ["salloc", "--nodes=4", "--ntasks-per-node=2", *SCALING, *sizes], timeout_s=300, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert not found["complete"]  # two rounds of five
    assert {(size["ranks"], size["nodes"], size["repeats"]) for size in found["sizes"]} == {
        (1, 1, 2), (2, 1, 2), (4, 2, 2), (8, 4, 2),
    }  # fmt: skip
    assert len({tuple(run["sample_sums"]) for run in found["runs"]}) == 1
    eight = next(run for run in found["runs"] if run["ranks"] == 8)
    assert len({rank["host"] for rank in eight["by_rank"]}) == 4
    assert {law["law"] for law in found["fits"]["laws"]} == {"linear", "Amdahl", "USL"}
    assert "efficiency" in done.stdout
    assert list(folder.glob(".hpctrain-scaling-*")) == []
    assert "report: report.html" in done.stdout
    page = (folder / "report.html").read_text()
    assert "digits: strong scaling on 1, 2, 4, 8 ranks</h1>" in page
    assert re.search(
        r"8 ranks reach \d+% \(95% interval \d+% to \d+%\) of the samples/s per rank on 1 rank", page
    )
    for ranks in (1, 2, 4, 8):
        assert f"<h3>ranks-{ranks}</h3>" in page
    assert "8 ranks on 4 nodes reach" in page
    assert "each node sends at least, MB" in page
    assert sorted(run.name for run in (folder / "scaling-runs").iterdir()) == [
        "ranks-1", "ranks-2", "ranks-4", "ranks-8",
    ]  # fmt: skip


@pytest.mark.thorough  # the command lines of srun: tests/unit/bench/test_splits.py
def test_splits_of_a_nodes_cores_are_on_one_node_of_the_allocation(cluster: Cluster, folder: Path) -> None:
    path = folder / "splits.json"
    job = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4"]
    words = [*SCALING, "--split-cores", "--at-most", "1", "--json", str(path)]
    done = cluster.run([*job, *words], timeout_s=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert {
        (run["ranks"], run["nodes"], *{rank["threads"] for rank in run["environment"]["ranks"]})
        for run in found["runs"]
    } == {(1, 1, 4), (2, 1, 2), (4, 1, 1)}
    assert all(run["environment"]["launcher"].startswith("Slurm") for run in found["runs"])
    assert found["splits"]["text"] in done.stdout


def test_each_run_is_a_job_of_its_own_size(cluster: Cluster, folder: Path) -> None:
    path = folder / "scaling.json"
    sizes = ["--nodes", "1,2", "--jobs", "--at-most", "1", "--json", str(path)]
    settings = ["--set", "slurm.tasks_per_node=1", "--set", "slurm.time=10"]
    done = cluster.run([*SCALING, *sizes, *settings], timeout_s=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert {(run["ranks"], run["nodes"]) for run in found["runs"]} == {(1, 1), (2, 2)}
    assert len({run["job"] for run in found["runs"]}) == 2
    assert len({tuple(run["sample_sums"]) for run in found["runs"]}) == 1
    assert list(folder.glob("slurm-*.out")) == []

    failing = ["--set", "task.target=no.such:Task", "--json", str(folder / "failing.json")]
    failed = cluster.run([*SCALING, *sizes[:-2], *settings, *failing], timeout_s=300, cwd=folder)
    assert failed.returncode == 5, failed.stderr
    assert "did not finish. Its last lines:" in failed.stderr
    assert "no.such" in failed.stderr
