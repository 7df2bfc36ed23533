"""`hpctrain supervise` on a real Slurm cluster: lost nodes, cut links, spares, requeues, nodes that come back."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.supervise import AttemptEnd
from tests.cluster import Cluster
from tests.cluster.supervised_jobs import NODE_STORAGE, command_of, prepare, records, revive, submit, trains
from tests.cluster.training_jobs import output, wait_for
from tests.supervised_runs import attempts

pytestmark = pytest.mark.launches

# So many nodes are lost one after another in the long trial, which the ordinary tests leave out.
LOSSES = min(int(os.environ.get("HPCTRAIN_TRIALS", "0")), 20)
# From the loss of a node to the first step that the nodes that are left make. The ordinary tests run beside other work.
GOES_ON_WITHIN_S = 20.0 if LOSSES else 240.0


def assert_goes_on(
    folder: Path, *, lost_at: float, attempt: int, cause: AttemptEnd = AttemptEnd.LOST_NODE
) -> float:
    """The attempt after a loss has begun in time, and from the newest checkpoint.

    Returns the seconds from the loss to the first step after it.
    """

    def steps_since() -> list[float]:
        newest = attempts(folder)[-1]
        begun = (
            newest.number == attempt and newest.first_step is not None
        )  # the supervisor looks twice per second
        return [at for at, _ in records(folder, "step") if begun and at > newest.began]

    first = wait_for(steps_since, folder=folder)[0]
    before, after = attempts(folder)[attempt - 2 :]
    assert before.cause is cause, before
    committed = [step for at, step in records(folder, "checkpoint") if at < lost_at]
    # More may have been saved than had been reported: by the nodes that were left, or between two reports.
    assert after.first_step is not None
    assert after.first_step >= max(committed), (before, after)
    assert before.last_step is not None
    assert before.steps_lost == max(0, before.last_step - after.first_step)
    assert first - lost_at < GOES_ON_WITHIN_S, output(folder)
    return first - lost_at


def fork_servers(cluster: Cluster, *places: str) -> list[int]:
    """The processes from which ranks are forked."""
    words = {pid: command_of(pid).split(b"\0") for place in places for pid in cluster.processes(place)}
    return [
        pid for pid, found in words.items() if found[1:] and found[1].endswith(b"fork_server/__main__.py")
    ]


def test_a_run_outlives_a_killed_node_a_cut_link_and_killed_ranks_and_uses_spares_and_nodes_that_come_back(
    cluster: Cluster, folder: Path
) -> None:
    prepare(folder, on_nodes=True)
    options = ["--nodes=4", "--ntasks-per-node=1"]
    job = submit(cluster, folder, *options, supervise="--min-nodes 2", env={"HPCTRAIN_SPARES": "1"})
    try:
        wait_for(trains(folder, attempt=1), folder=folder)
        assert attempts(folder)[0].nodes == ("hpct0", "hpct1", "hpct2")
        lost_at = time.time()
        # Its checkpoints are gone with it: the partner has copies.
        cluster.kill_node("hpct2", lost=[NODE_STORAGE])
        assert_goes_on(folder, lost_at=lost_at, attempt=2)
        assert attempts(folder)[0].blamed == ("hpct2",)
        assert attempts(folder)[1].nodes == ("hpct0", "hpct1", "hpct3")  # the spare
        wait_for(trains(folder, attempt=2), folder=folder)
        lost_at = time.time()
        cluster.cut_link("hpct3")
        try:
            assert_goes_on(folder, lost_at=lost_at, attempt=3)
        finally:
            cluster.mend_link("hpct3")
        assert attempts(folder)[1].blamed == ("hpct3",)
        assert (attempts(folder)[2].nodes, attempts(folder)[2].ranks) == (("hpct0", "hpct1"), 2)
        cluster.start_slurmd("hpct2")
        wait_for(trains(folder, attempt=3), folder=folder)
        # All ranks of a node are killed: that is not losing the node. One that has come back is used again.
        servers = fork_servers(cluster, "hpct0", "hpct1")
        assert len(servers) == 2
        os.kill(cluster.ranks(job)[1], signal.SIGKILL)
        wait_for(trains(folder, attempt=4), folder=folder)
        assert fork_servers(cluster, "hpct0", "hpct1") == servers  # nothing is imported again
        assert (attempts(folder)[2].cause, attempts(folder)[2].blamed) == (AttemptEnd.LOST_RANK, ("hpct1",))
        assert attempts(folder)[3].nodes == ("hpct0", "hpct1", "hpct2")
        for node in ("hpct1", "hpct2", "hpct3"):
            cluster.kill_node(node)
        wait_for(lambda: "queueing it again" in output(folder), folder=folder)
        for node in ("hpct1", "hpct2", "hpct3"):
            cluster.start_slurmd(node)
        wait_for(trains(folder, attempt=5), folder=folder)
        again = attempts(folder)[4]
        # hpct1 and hpct2 have failed twice.
        assert (again.job, again.allocation, again.nodes) == (str(job), 1, ("hpct0", "hpct3"))
        asked = cluster.run(["scancel", "--batch", "--signal=USR1", str(job)], timeout_s=300)
        assert asked.returncode == 0, asked.stderr
        wait_for(lambda: attempts(folder)[4].cause, folder=folder)
        assert (attempts(folder)[4].cause, attempts(folder)[4].exit_code) == (AttemptEnd.PREEMPTION, 75)
        until_s = time.monotonic() + 60
        while (left := fork_servers(cluster, "hpct0", "hpct3")) and time.monotonic() < until_s:
            time.sleep(0.2)
        assert not left
    finally:
        cluster.run(["scancel", str(job)], timeout_s=300)
        for node in cluster.node_names:
            revive(cluster, node)


@pytest.mark.trials
@pytest.mark.thorough
@pytest.mark.skipif(
    LOSSES == 0, reason="HPCTRAIN_TRIALS=20 loses so many nodes, links and ranks, one after another"
)
@pytest.mark.timeout(60 + 60 * 3 * LOSSES)
def test_many_losses(cluster: Cluster, folder: Path) -> None:
    """A node is killed, the link of a node is cut, a rank is killed, in turns. Each node comes back before the next
    loss, and is used at the next start."""
    prepare(folder, on_nodes=True)
    options = ["--nodes=4", "--ntasks-per-node=1", "--time=120"]
    job = submit(cluster, folder, *options, supervise="--node-budget 999 --max-restarts 999")
    draw = random.Random()
    kinds = ("nodes killed", "links cut", "ranks killed")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    repeated: dict[str, list[int]] = {kind: [] for kind in kinds}
    try:
        for number in range(3 * LOSSES):
            kind = kinds[number % 3]
            wait_for(trains(folder, attempt=number + 1), folder=folder)
            time.sleep(draw.uniform(0, 1.5))
            nodes = attempts(folder)[-1].nodes
            node = draw.choice(nodes[1:])  # never hpct0, which is the batch host
            lost_at = time.time()
            if kind == "nodes killed":
                cluster.kill_node(node, lost=[NODE_STORAGE])
            elif kind == "links cut":
                cluster.cut_link(node)
            else:
                # At its node: a rank of an earlier start may still run on a node that was cut off.
                os.kill(cluster.ranks(job, node)[nodes.index(node)], signal.SIGKILL)
            try:
                cause = AttemptEnd.LOST_RANK if kind == "ranks killed" else AttemptEnd.LOST_NODE
                took_s = assert_goes_on(folder, lost_at=lost_at, attempt=number + 2, cause=cause)
                seconds[kind].append(took_s)
            finally:
                if kind == "nodes killed":
                    cluster.start_slurmd(node)
                elif kind == "links cut":
                    cluster.mend_link(node)
            before, after = attempts(folder)[-2:]
            assert before.blamed == (node,)
            # All others, also the one that was lost before. A node whose rank was killed is not lost.
            lost = () if kind == "ranks killed" else (node,)
            assert after.nodes == tuple(name for name in cluster.node_names if name not in lost)
            repeated[kind].append(before.steps_lost or 0)
            print(f"loss {number + 1}: {kind}: {node}, {seconds[kind][-1]:.1f} s, {repeated[kind][-1]} steps repeated, "
                  f"continues on {len(after.nodes)} nodes", flush=True)  # fmt: skip
    finally:
        cluster.run(["scancel", str(job)], timeout_s=300)
        for node in cluster.node_names:
            revive(cluster, node)
    for kind in kinds:
        print(
            f"{len(seconds[kind])} {kind}: from the loss to the next step {np.median(seconds[kind]):.1f} s (median), "
            f"at most {max(seconds[kind]):.1f} s; at most {max(repeated[kind])} steps repeated"
        )
