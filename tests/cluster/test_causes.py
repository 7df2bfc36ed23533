"""Failures of every kind are provoked on a real Slurm cluster, and the ledger of `hpctrain supervise` names each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpctrain.supervise import Attempt, AttemptEnd
from tests.cluster import Cluster
from tests.cluster.supervised_jobs import prepare, revive, submit, trains
from tests.cluster.training_jobs import output, wait_for
from tests.supervised_runs import attempts

pytestmark = pytest.mark.launches

TRIALS = int(os.environ.get("HPCTRAIN_TRIALS", "0"))
ROUNDS = min(TRIALS, 3)
# What rank 1 does at each attempt (tests/faults/planned_failures.py), and the cause that is named for it. Damaged data
# stay damaged: they come last.
PLANNED = {
    "memory": AttemptEnd.OUT_OF_MEMORY,
    "replicas": AttemptEnd.CHECKPOINT,
    "stop": AttemptEnd.HANG,
    "data": AttemptEnd.DATA,
}
PLANNED_IN_TRIALS = {
    "raise": AttemptEnd.USER_ERROR,
    "disk": AttemptEnd.DISK_FULL,
    "segfault": AttemptEnd.LOST_RANK,
    "none": AttemptEnd.LOST_NODE,  # the test kills the node
    **PLANNED,
}
# These end the job, each one of its own.
ENDINGS = (AttemptEnd.WALL_CLOCK, AttemptEnd.PREEMPTION, AttemptEnd.CANCELLED)
ONE_RANK = ["--nodes=1", "--ntasks-per-node=1"]


def submit_planned(cluster: Cluster, folder: Path, data: Path, *, plan: list[str]) -> int:
    """A job of two ranks on two nodes of three; the third is a spare. It is submitted in `folder`."""
    shutil.copytree(data, folder / "data")  # it will be damaged
    prepare(folder, plan=",".join(plan), timeout_s=8, data='check = "always"')
    options = ["--nodes=3", "--ntasks-per-node=1", "--nodelist=hpct[0-2]"]
    # The failures are attributed to one node.
    limits = "--node-budget 99 --max-restarts 99"
    return submit(cluster, folder, *options, supervise=limits, env={"HPCTRAIN_SPARES": "1"})


def check_planned(
    cluster: Cluster, folder: Path, *, job: int, planned: dict[str, AttemptEnd]
) -> tuple[Attempt, ...]:
    """Waits until the supervisor has given up; each attempt has the cause that was planned. Returns the attempts."""
    wait_for(lambda: "given up" in output(folder), folder=folder, timeout_s=300 + 40 * len(planned))
    end = cluster.wait_for(job, timeout_s=300)
    found = attempts(folder)
    assert [attempt.cause for attempt in found] == [*planned.values(), AttemptEnd.DATA], output(folder)
    assert found[-1].decision == "give up: the same error (data) a second time"
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 76, 0), output(folder)
    first_steps = [attempt.first_step or 0 for attempt in found]
    assert first_steps == sorted({*first_steps}), first_steps  # each continues from a newer checkpoint
    assert all(
        attempt.blamed == attempt.nodes[1:]  # where rank 1 is
        for attempt in found
        if attempt.cause in (AttemptEnd.HANG, AttemptEnd.LOST_RANK, AttemptEnd.LOST_NODE)
    ), [(attempt.cause, attempt.nodes, attempt.blamed) for attempt in found]
    return found


def test_the_ledger_names_what_was_provoked_and_ends_with_the_code_that_says_do_not_requeue(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    job = submit_planned(cluster, tmp_path, data, plan=list(PLANNED))
    check_planned(cluster, tmp_path, job=job, planned=PLANNED)


@pytest.mark.trials
@pytest.mark.thorough
@pytest.mark.parametrize("number", range(ROUNDS))
def test_the_ledger_names_every_kind_of_failure(
    cluster: Cluster, data: Path, tmp_path: Path, number: int
) -> None:
    folders = {name: tmp_path / name for name in ("planned", *(cause.value for cause in ENDINGS))}
    for folder in folders.values():
        folder.mkdir()
    planned = folders.pop("planned")
    for folder in folders.values():
        (folder / "data").symlink_to(data)
        prepare(folder)
    job = submit_planned(cluster, planned, data, plan=list(PLANNED_IN_TRIALS))
    limited = folders[AttemptEnd.WALL_CLOCK.value]
    # Slurm's own warning is one that nothing reacts to.
    options = [*ONE_RANK, "--nodelist=hpct2", "--time=1", "--signal=B:CONT@1"]
    submit(cluster, limited, *options, env={"HPCTRAIN_MAX_REQUEUES": "0"})
    preempt(cluster, folders[AttemptEnd.PREEMPTION.value])
    cancel(cluster, folders[AttemptEnd.CANCELLED.value])
    lose_a_node(cluster, planned, attempt=1 + list(PLANNED_IN_TRIALS).index("none"))
    found = list(check_planned(cluster, planned, job=job, planned=PLANNED_IN_TRIALS))
    for cause in ENDINGS:
        folder = folders[cause.value]
        wait_for(lambda folder=folder: attempts(folder)[0].cause, folder=folder)
        assert attempts(folder)[0].cause is cause, output(folder)
        found.append(attempts(folder)[0])
    kinds = {attempt.cause for attempt in found}
    assert kinds == set(AttemptEnd) - {AttemptEnd.FINISHED, AttemptEnd.UNKNOWN}
    lines = [f"{attempt.cause.value}: {attempt.reason}" for attempt in found if attempt.cause is not None]
    print(
        "\n".join([f"round {number + 1}: {len(found)} of {len(found)} named, of {len(kinds)} causes", *lines])
    )


def preempt(cluster: Cluster, folder: Path) -> None:
    """A job of a partition of higher priority takes the node."""
    job = submit(cluster, folder, *ONE_RANK, "--nodelist=hpct3", "--partition=preemptible")
    wait_for(trains(folder, attempt=1), folder=folder)
    urgent = ["--nodelist=hpct3", "--nodes=1", "--exclusive", "--wrap", "sleep 1"]
    taking = cluster.submit(urgent, cwd=folder)
    wait_for(lambda: "queueing it again" in output(folder), folder=folder)
    assert cluster.run(["scancel", str(job)], timeout_s=300).returncode == 0
    assert cluster.wait_for(taking, timeout_s=300).state == "COMPLETED"


def cancel(cluster: Cluster, folder: Path) -> None:
    job = submit(cluster, folder, *ONE_RANK, "--nodelist=hpct3")
    wait_for(trains(folder, attempt=1), folder=folder)
    assert cluster.run(["scancel", str(job)], timeout_s=300).returncode == 0
    assert cluster.wait_for(job, timeout_s=300).state == "CANCELLED"


def lose_a_node(cluster: Cluster, folder: Path, *, attempt: int) -> None:
    """All processes of the node of rank 1 are killed; then it comes back."""
    wait_for(trains(folder, attempt=attempt), folder=folder, timeout_s=300)
    node = attempts(folder)[-1].nodes[1]
    cluster.kill_node(node)
    wait_for(lambda: attempts(folder)[attempt - 1].cause, folder=folder)
    revive(cluster, node)
