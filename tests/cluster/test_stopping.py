"""Stopping in time on a real Slurm: what squeue tells, of arrays and heterogeneous jobs too; signals to one rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.training_jobs import running, wait_for
from tests.stop_trials import Started, StopTrials, moments_of

pytestmark = pytest.mark.launches

# `make trials-slurm` sets it to 100.
TRIALS = int(os.environ.get("HPCTRAIN_TRIALS", "3"))
RANKS_PER_NODE = 2 if TRIALS >= 20 else 1

_ASKS = "#!/bin/bash\nuntil [[ -e go ]]; do sleep 0.1; done\npython -m tests.cluster.rank_cases time_left .\n"


def answer_of(folder: Path, job: str) -> dict[str, Any]:
    path = folder / f"{job}.json"
    wait_for(path.exists, folder=folder)
    return json.loads(path.read_text())


def all_run(cluster: Cluster, job: int, *, num: int) -> bool:
    asked = cluster.run(["squeue", "--noheader", f"--jobs={job}", "--array", "--format=%T"], timeout_s=300)
    return asked.stdout.split() == ["RUNNING"] * num


def test_each_task_of_an_array_learns_its_own_end_also_when_its_limit_is_changed(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(_ASKS)
    job = cluster.submit(["--array=0-1", "--nodes=1", "--ntasks=1", "--time=5", str(script)], cwd=tmp_path)
    wait_for(lambda: all_run(cluster, job, num=2), folder=tmp_path)
    changed = cluster.run(["scontrol", "update", f"JobId={job}_0", "TimeLimit=9"], timeout_s=300)
    assert changed.returncode == 0, changed.stderr
    (tmp_path / "go").touch()
    first, second = (answer_of(tmp_path, f"{job}_{task}") for task in (0, 1))
    assert first["problem"] is second["problem"] is None
    assert 430 < first["left_s"] <= 541
    assert 200 < second["left_s"] <= 301
    for task, found in enumerate((first, second)):
        assert found["allocation"][0] == f"{job}_{task}"
        assert found["allocation_left_s"] == pytest.approx(found["left_s"], abs=20)


def test_of_a_heterogeneous_job_the_component_that_ends_first_counts_and_ranks_can_be_in_all(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"{_ASKS}srun --het-group=0,1 python -m tests.cluster.rank_cases who .\n")
    (tmp_path / "go").touch()
    words = ["--nodes=1", "--ntasks=1", "--time=9", ":", "--nodes=1", "--ntasks=1", "--time=5"]
    job = cluster.submit([*words, str(script)], cwd=tmp_path)
    found = answer_of(tmp_path, str(job))
    assert found["problem"] is None
    assert 200 < found["left_s"] <= 301
    assert f"the Slurm job {job} is heterogeneous, with 2 components" in found["refused"]
    paths = [tmp_path / f"rank-{rank}.json" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() and path.stat().st_size for path in paths), folder=tmp_path)
    ranks = [json.loads(path.read_text()) for path in paths]
    assert [(rank["rank"], rank["num_ranks"], rank["mpi_num_ranks"]) for rank in ranks] == [
        (0, 2, 2),
        (1, 2, 2),
    ]
    assert len({rank["host"] for rank in ranks}) == 2


# ---------------------------------------------------------------------- signals to one rank


def starting(cluster: Cluster) -> Callable[..., AbstractContextManager[Started]]:
    def start(
        arguments: Sequence[str], folder: Path, environ: Mapping[str, str]
    ) -> AbstractContextManager[Started]:
        # Blocked from the first instruction: Python takes a moment to come to our code, which blocks them too.
        held = ["env", "--block-signal=USR1,TERM"]
        srun = ["srun", "--nodes=2", f"--ntasks-per-node={RANKS_PER_NODE}", "--wait=30"]
        return running(cluster, [*srun, *held, "hpctrain", "train", *arguments], folder, environ)

    return start


@pytest.mark.trials
@pytest.mark.thorough  # tests/ranks/train/test_stopping.py, with mpirun
@pytest.mark.timeout(120 + 60 * TRIALS)
def test_a_signal_to_one_rank_at_any_moment_stops_all_at_one_step_and_the_resume_is_exact(
    cluster: Cluster, tmp_path: Path
) -> None:
    seed = time.time_ns() % 1000
    trials = StopTrials(starting(cluster), num_ranks=2 * RANKS_PER_NODE, directory=tmp_path, seed=seed)
    outcome = trials.run(moments_of(TRIALS))
    print(f"{outcome.describe()}; seed {seed}")
    assert outcome.num_signals == TRIALS
    assert outcome.num_stops >= 0.7 * TRIALS  # others came after the last step
    if TRIALS >= 20:
        assert outcome.num_before_first_step >= TRIALS // 5
        assert outcome.num_in_saves >= TRIALS // 5
