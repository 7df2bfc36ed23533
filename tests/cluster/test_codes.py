"""The exit code of a job is that of the rank that failed first, where srun gives another one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterPlan
from tests.cluster.plan import MEMORY_GROUPS
from tests.cluster.training_jobs import output
from tests.memory_group import memory_group
from tests.ranks_launcher import REPOSITORY
from tests.runbook import find_shown

pytestmark = pytest.mark.launches

# `make trials-slurm` sets it to 100.
TRIALS = min(int(os.environ.get("HPCTRAIN_TRIALS", "1")), 20)
SCRIPT = str(REPOSITORY / "slurm" / "train.sbatch")


def ends(cluster: Cluster, folder: Path, case: str, *options: str) -> Counter[tuple[int, int]]:
    """Runs slurm/train.sbatch `TRIALS` times, with ranks that do what `case` says. Returns how often the jobs ended
    with which code and number of restarts."""
    program = folder / "bin" / "hpctrain"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec python -m tests.cluster.rank_cases {case}\n")
    program.chmod(0o755)
    environ = {"HPCTRAIN_ENVIRONMENT": str(folder), "HPCTRAIN_MAX_REQUEUES": "1"}
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(TRIALS):
        job = cluster.submit([*options, SCRIPT, "recipe.toml"], cwd=folder, env=environ)
        end = cluster.wait_for(job, timeout_s=300)
        found[end.exit_code, end.num_restarts] += 1
    print(f"{case}: {dict(found)}")
    return found


@pytest.mark.trials
@pytest.mark.timeout(300 + 60 * TRIALS)
def test_a_rank_that_failed_while_others_stopped_fails_the_job(cluster: Cluster, tmp_path: Path) -> None:
    found = ends(cluster, tmp_path, "leave 75 3", "--nodes=2", "--ntasks-per-node=2")
    assert found == {(3, 0): TRIALS}, output(tmp_path)
    assert "queueing it again" not in output(tmp_path)


@pytest.fixture
def limited(cluster_folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes whose Slurm keeps jobs within their memory."""
    with memory_group(8_000_000_000) as group:
        if MEMORY_GROUPS not in group.parents:
            pytest.skip(f"no control groups of version 1 in {MEMORY_GROUPS}")
        directory = cluster_folder / f"test-{os.getpid()}-memory"
        plan = ClusterPlan(directory=directory, num_nodes=2, rate=None, cores_per_node=4, memory_group=group)
        with Cluster.up(plan, shared=[tmp_path]) as up:
            yield up


@pytest.mark.trials
@pytest.mark.timeout(300 + 60 * TRIALS)
def test_a_rank_that_the_kernel_has_killed_for_want_of_memory_gives_137(
    limited: Cluster, tmp_path: Path
) -> None:
    found = ends(limited, tmp_path, "fill_memory", "--nodes=2", "--ntasks-per-node=2", "--mem=500M")
    assert found == {(137, 0): TRIALS}, output(tmp_path)
    assert output(tmp_path).count(": Out Of Memory") == TRIALS
    find_shown(output(tmp_path), ": Out Of Memory", page="f6-out-of-memory.md")
