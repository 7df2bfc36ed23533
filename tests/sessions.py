"""A session over any world, without a launcher, and the training of a recipe in it: what several tests begin with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import Monitored, SerialWorld, World
from hpctrain.launch import RankIdentity
from hpctrain.resilience import CheckpointSignal, StopRequest, WallClock
from hpctrain.run import Session, parse_recipe
from hpctrain.topology import Topology
from hpctrain.train.task.task import Task

_opened: list[Monitored] = []
_left: list[Path] = []


def session_over(
    world: World, *, nodes: Sequence[str] | None = None, emulated: bool = False, device: str = "cpu"
) -> Session:
    """nodes: the name of each rank's node; by default all ranks are on one."""
    names = list(nodes or ["here"] * world.num_ranks)
    monitored = Monitored(world, timeout_s=300)
    _opened.append(monitored)
    identity = RankIdentity(
        launcher="test", rank=world.rank, num_ranks=world.num_ranks, local_rank=None, local_size=None,
        node_rank=None, node_name=names[world.rank],
    )  # fmt: skip
    return Session(
        identity=identity, world=monitored, device=torch.device(device),
        topology=Topology.from_node_names(names, emulated=emulated),
    )  # fmt: skip


def carried_out(
    document: dict[str, Any], task: Task, *, world: World | None = None, nodes: Sequence[str] | None = None,
    stop: StopRequest | None = None, resume: str = "auto", clock: WallClock | None = None,
    save_signal: CheckpointSignal | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trains as the recipe `document` says, on one rank or on those of `world`. clock: of rank 0."""
    from hpctrain.run.training import Resume, carry_out

    session = session_over(world or SerialWorld(), nodes=nodes)
    return carry_out(
        parse_recipe(document), task, session=session, resume=Resume.parse(resume), stop=stop or StopRequest(),
        clock=clock if session.rank == 0 else None, save_signal=save_signal,
    )  # fmt: skip


def close_sessions() -> None:
    """Ends the watchers of all that `session_over` has returned, whether or not the test has closed it, and checks that
    nothing of them is left in the node's memory."""
    while _opened:
        watcher = _opened.pop()._watcher
        watcher.end()
        if watcher._board is not None:
            _left.append(watcher._board.folders.local)
    while _left:
        assert not _left.pop().exists()
