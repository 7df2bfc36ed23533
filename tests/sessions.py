"""A session over any world, without a launcher: what several tests begin with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.comm import Monitored, World
from hpctrain.launch import RankIdentity
from hpctrain.run import Session
from hpctrain.topology import Topology


def session_over(
    world: World, *, nodes: Sequence[str] | None = None, emulated: bool = False, device: str = "cpu"
) -> Session:
    """nodes: the name of each rank's node; by default all ranks are on one."""
    names = list(nodes or ["here"] * world.num_ranks)
    identity = RankIdentity(
        launcher="test", rank=world.rank, num_ranks=world.num_ranks, local_rank=None, local_size=None,
        node_rank=None, node_name=names[world.rank],
    )  # fmt: skip
    return Session(
        identity=identity, world=Monitored(world, timeout_s=60), device=torch.device(device),
        topology=Topology.from_node_names(names, emulated=emulated),
    )  # fmt: skip
