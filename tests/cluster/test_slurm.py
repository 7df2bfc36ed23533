"""hpctrain on a real Slurm cluster: srun, sbatch, mpirun in a job, stops, requeues, killed ranks, bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpctrain.launch.yielding import find_yield_library
from tests.cluster import Cluster
from tests.cluster.training_jobs import LONG, RECIPE, STOPPED, LimitWatch, output, trains, wait_for
from tests.ranks_launcher import REPOSITORY
from tests.run_files import records_of
from tests.runbook import find_shown
from tests.stop_trials import SAMPLES, check_equal, prepare, samples_seen

pytestmark = pytest.mark.launches

SCRIPT = str(REPOSITORY / "slurm" / "train.sbatch")
TRIALS = int(os.environ.get("HPCTRAIN_TRIALS", "0"))
# The job that is queued again stops itself so long before its limit, which is a minute, the least that Slurm knows.
MARGIN_S = 10 if TRIALS else 30
# 20 steps per epoch, of 0.17 s: 31 s, too much for one start of 30 s; in the long trials (50 and more) 54 s or more.
EPOCHS_REQUEUED = 16 * min(5, max(1, TRIALS // 10)) if TRIALS else 9
FINISHES_WITHIN_S = 100 + 6 * EPOCHS_REQUEUED
# The node of the jobs that run beside the tests: the others' cores are free for those.
BESIDE = "hpct3"


@pytest.fixture(scope="module", autouse=True)
def limited(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A job with the shortest limit there is, a minute; it runs beside the tests, and the last one looks at it."""
    where = tmp_path_factory.mktemp("limited")
    (where / "data").symlink_to(data)
    words = ["--nodes=1", "--ntasks-per-node=1", f"--nodelist={BESIDE}", "--time=1", "--signal=B:USR1@15"]
    environ = {"HPCTRAIN_MAX_REQUEUES": "0"}
    warned = ["--set", "stop.margin_s=2"]  # by Slurm, before the ranks' own clock stops them
    return cluster.submit([*words, SCRIPT, RECIPE, *LONG, *warned], cwd=where, env=environ), where


@dataclass(frozen=True, kw_only=True)
class Requeued:
    """A job that is queued again and again. `watch` notes how it ends."""

    job: int
    folder: Path
    watch: LimitWatch


@pytest.fixture(scope="module", autouse=True)
def requeued(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requeued]:
    """A job with more work than a minute allows, which only its own clock stops. It runs during the other tests."""
    where = tmp_path_factory.mktemp("requeued")
    prepare(where)
    (where / "seen").mkdir()
    # Slurm's own warning is one that nothing reacts to. One node: a test beside it counts what the nodes send.
    words = ["--nodes=1", "--ntasks-per-node=2", f"--nodelist={BESIDE}", "--time=1", "--signal=B:CONT@1"]
    settings = [f"run.epochs={EPOCHS_REQUEUED}", "task.options.step_s=0.17", f"stop.margin_s={MARGIN_S}"]
    job = cluster.submit(
        [*words, SCRIPT, "recipe.toml", *(word for each in settings for word in ("--set", each))],
        cwd=where, env={"SEEN": str(where / "seen")},
    )  # fmt: skip
    watch = LimitWatch(cluster, job)
    yield Requeued(job=job, folder=where, watch=watch)
    watch.close()


def environment(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / "digits" / "environment.json").read_text())


def test_mpirun_in_a_job_trains_on_two_nodes_with_what_auto_chose_for_their_slow_link(
    cluster: Cluster, folder: Path
) -> None:
    rate_bytes_per_s = 200e6 / 8
    script = folder / "job.sh"
    recipe = f"{RECIPE} --set run.epochs=1 --set reduction.algorithm=auto"
    script.write_text(f"#!/bin/bash\nexec mpirun -n 4 --map-by ppr:2:node hpctrain train {recipe}\n")
    cluster.set_rate("200mbit")
    try:
        job = cluster.submit(["--nodes=2", "--ntasks-per-node=2", str(script)], cwd=folder)
        end = cluster.wait_for(job, timeout_s=300)
    finally:
        cluster.set_rate("1gbit")
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)
    found = environment(folder)
    assert found["launcher"] == "Open MPI"
    assert found["ranks_by_node"] == [[0, 1], [2, 3]]
    first, second = found["node_names"]
    assert [rank["host"] for rank in found["ranks"]] == [first, first, second, second]
    assert "finished at step 23" in output(folder)
    measured = found["reduction"]
    assert measured["calibration_s"] > 0
    within, between = measured["levels"]
    assert (within["axis"], between["axis"]) == ("local", "node")
    # No message is faster than the link; the latency of a busy moment, taken off, makes it look so, at most twice.
    assert 0 < between["bytes_per_s"] < 2.1 * rate_bytes_per_s
    assert within["bytes_per_s"] > between["bytes_per_s"]
    assert any(each["measured"] for each in measured["candidates"])


@pytest.mark.thorough  # the job that is stopped by its limit, below; an array's task in test_slurm_commands.py
def test_a_stopped_job_queues_itself_again_and_goes_on_from_there(cluster: Cluster, folder: Path) -> None:
    # --resume never is meant for the first start: what is queued again must not begin again.
    job = cluster.submit([SCRIPT, RECIPE, *STOPPED, "--resume", "never"], cwd=folder)
    wait_for(trains(folder), folder=folder)
    asked = cluster.run(["scancel", "--batch", "--signal=USR1", str(job)], timeout_s=300)
    assert asked.returncode == 0, asked.stderr
    wait_for(lambda: "queueing it again" in output(folder), folder=folder, timeout_s=300)
    end = cluster.wait_for(job, timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("COMPLETED", 0, 1), output(folder)
    printed = output(folder)
    for text in ("stopped after step", "queueing it again", "resumed from"):
        find_shown(printed, text, page="f7-stop-and-resume.md")
    assert re.search(r"start 2: 4 ranks on hpct\[\d[-,]\d\]", printed), printed
    assert "finished at step 460" in printed
    assert environment(folder)["ranks_by_node"] == [[0, 1], [2, 3]]
    assert environment(folder)["algorithm"] == "hierarchical"


def test_a_cancelled_job_saves_and_does_not_come_back(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit(["--nodes=1", "--ntasks-per-node=1", SCRIPT, RECIPE, *LONG], cwd=folder)
    wait_for(trains(folder), folder=folder)
    assert cluster.run(["scancel", str(job)], timeout_s=300).returncode == 0
    end = cluster.wait_for(job, timeout_s=300)
    assert (end.state, end.num_restarts) == ("CANCELLED", 0), output(folder)
    wait_for(lambda: list((folder / "runs" / "digits" / "checkpoints").glob("step-*.h5")), folder=folder)
    assert "queueing it again" not in output(folder)


def test_a_killed_rank_ends_the_job_within_a_minute(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit([SCRIPT, RECIPE, *LONG], cwd=folder)
    wait_for(trains(folder), folder=folder)
    ranks = cluster.ranks(job)
    assert sorted(ranks) == [0, 1, 2, 3]
    second = environment(folder)["node_names"][1]
    assert cluster.same_namespace(ranks[3], place=second)
    os.kill(ranks[3], signal.SIGKILL)
    start_s = time.monotonic()
    end = cluster.wait_for(job, timeout_s=300)
    assert time.monotonic() - start_s < 60
    assert end.state == "FAILED"
    assert end.exit_code == 128 + signal.SIGKILL
    assert end.num_restarts == 0
    find_shown(output(folder), f"{second}: task 3: Killed", page="f3-hang-or-lost-rank.md")
    wait_for(lambda: not cluster.ranks(job), folder=folder, timeout_s=60)


@pytest.mark.skipif(find_yield_library() is None, reason="hpctrain/launch/_yield_by_sleep.c was not compiled")
def test_ranks_of_plain_srun_start_anew_once_where_they_outnumber_the_cores(cluster: Cluster) -> None:
    """The cluster itself sets what this would find: all its nodes share one machine's cores."""
    plain = ["env", "-u", "LD_PRELOAD", "-u", "OMPI_MCA_mpi_yield_when_idle", "srun", "--nodes=2"]
    rank = ["python", "-m", "tests.ranks.launch.restart_rank", "rank"]
    for options, expected in (
        (["--ntasks=6", "--overcommit"], [True, "1", False]),
        (["--ntasks=2"], [False, None, False]),
    ):
        done = cluster.run([*plain, *options, *rank], timeout_s=300, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.splitlines()) == {f"rank: {expected}"}


def test_doctor_mpirun_and_launch_in_a_job(cluster: Cluster, tmp_path: Path) -> None:
    """mpirun needs no ssh: it starts its daemons on the job's nodes with srun."""
    script, launched = tmp_path / "job.sh", tmp_path / "launched"
    launched.mkdir()
    script.write_text(
        "#!/bin/bash\n"
        # As with a wrong --cpu-bind: the ranks of a node share one core.
        "srun taskset --cpu-list 0 hpctrain doctor > doctor.out 2>&1; echo $? > doctor.code\n"
        # What a container does that lets no variables in: a border of mounts, an empty environment.
        "srun unshare --mount env -i PATH=$PATH PYTHONPATH=$PYTHONPATH APPTAINER_CONTAINER=/a.sif"
        " python -m tests.cluster.rank_cases alone > alone.out 2>&1\n"
        f"mpirun -n 4 --map-by ppr:2:node python -m tests.cluster.rank_cases who {tmp_path} > mpirun.out 2>&1\n"
        "echo $? > mpirun.code\n"
        f"hpctrain launch -n 4 --ranks-per-node 2 -- python -m tests.cluster.rank_cases who {launched}"
        " > launch.out 2>&1\n"
        "echo $? > launch.code\n"
    )
    job = cluster.submit(["--nodes=2", "--ntasks-per-node=2", str(script)], cwd=tmp_path)
    end = cluster.wait_for(job, timeout_s=300)
    assert end.exit_code == 0
    reported = (tmp_path / "doctor.out").read_text()
    assert (tmp_path / "doctor.code").read_text() == "0\n", reported
    assert "0 problems; 4 ranks" in reported
    assert "2 nodes x 2 ranks: hpct0, hpct1" in reported
    find_shown(reported, "2 ranks on 1 core", page="f8-affinity.md")
    # As the cluster is configured; and its nodes share one clock.
    assert re.search(r"Slurm: KillWait +5 s after SIGTERM", reported)
    assert "those of 2 hosts agree within 0." in reported
    hidden = (tmp_path / "alone.out").read_text().splitlines()
    assert len(hidden) == 4
    assert all("outside of it slurmstepd started 2 processes on this node" in line for line in hidden)
    assert (tmp_path / "mpirun.code").read_text() == "0\n", (tmp_path / "mpirun.out").read_text()
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in found] == ["hpct0", "hpct0", "hpct1", "hpct1"]
    assert {rank["launcher"] for rank in found} == {"Open MPI"}
    for rank, facts in enumerate(found):
        assert facts["rank"] == facts["mpi_rank"] == rank
        assert facts["num_ranks"] == facts["mpi_num_ranks"] == 4
        assert facts["sum"] == 6
    assert (tmp_path / "launch.code").read_text() == "0\n", (tmp_path / "launch.out").read_text()
    assert "srun --mpi=pmix" in (tmp_path / "launch.out").read_text()
    found = [json.loads((launched / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in found] == ["hpct0", "hpct0", "hpct1", "hpct1"]
    assert {rank["launcher"] for rank in found} == {"Slurm"}


@pytest.mark.thorough
def test_a_two_level_sum_sends_the_bytes_that_theory_says(cluster: Cluster) -> None:
    num_elems, num_nodes = 4_000_000, 4
    before = cluster.bytes_sent()
    srun = ["srun", "--nodes=4", "--ntasks-per-node=2"]
    case = ["python", "-m", "tests.cluster.rank_cases", "reduce", str(num_elems)]
    done = cluster.run([*srun, *case], timeout_s=300)
    assert done.returncode == 0, done.stderr
    bound = 2 * (num_nodes - 1) / num_nodes * num_elems * 4
    for node, sent in cluster.bytes_sent().items():
        assert bound <= sent - before[node] <= 1.1 * bound


def test_slurm_warns_before_the_time_limit_and_the_job_saves(
    cluster: Cluster, limited: tuple[int, Path]
) -> None:
    job, folder = limited
    end = cluster.wait_for(job, timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 75, 0), (
        f"{end}: {output(folder)[-2000:]}"
    )
    find_shown(output(folder), "stopped after step", page="f7-stop-and-resume.md")
    assert "queued again 0 times before" in output(folder)


@pytest.mark.trials
@pytest.mark.timeout(150 + FINISHES_WITHIN_S)
def test_a_job_with_more_work_than_its_limit_stops_itself_and_is_requeued_until_it_has_finished_exactly(
    cluster: Cluster, requeued: Requeued
) -> None:
    job, folder = requeued.job, requeued.folder
    whole = ["run.directory=whole", f"run.epochs={EPOCHS_REQUEUED}", "task.options.step_s=0.0"]
    (folder / "seen-whole").mkdir()
    uninterrupted = cluster.run(
        ["srun", "--nodes=1", "--ntasks-per-node=2", "hpctrain", "train", "recipe.toml",
         *(word for each in whole for word in ("--set", each))],
        timeout_s=300, cwd=folder, env={"SEEN": str(folder / "seen-whole")},
    )  # fmt: skip
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    end = cluster.wait_for(job, timeout_s=FINISHES_WITHIN_S)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)
    assert end.num_restarts >= 1
    printed = output(folder)
    for text in (
        "the run saves and stops before that",
        "stopped after step",
        "queueing it again",
        "resumed from",
    ):
        as_shown = printed.replace("resumed from run/", "resumed from runs/digits/")
        find_shown(as_shown, text, page="f7-stop-and-resume.md")
    assert "DUE TO TIME LIMIT" not in printed
    stops = records_of(folder / "run", "stopped")
    assert len(stops) == end.num_restarts
    assert {stop["reason"] for stop in stops} == {"Slurm's time limit"}
    at_stops_s = [stop["time_left_s"] for stop in stops]
    requeued.watch.close()
    tails_s = requeued.watch.left_s[: end.num_restarts]
    lines = [line for line in printed.splitlines() if not line.startswith("step ")]
    print("\n".join(lines))
    print(
        f"{end.num_restarts} requeues; left of the limit of 60 s when the state was saved: {at_stops_s} s; when the "
        f"job had ended: {[round(tail_s, 1) for tail_s in tails_s]} s"
    )
    assert all(0 < seconds < MARGIN_S + 4 for seconds in at_stops_s)  # a step and a save take a second
    assert len(tails_s) == end.num_restarts
    assert min(tails_s) > 0
    check_equal(folder / "run", folder / "whole")
    assert samples_seen(folder / "seen") == dict.fromkeys(range(SAMPLES), EPOCHS_REQUEUED)
