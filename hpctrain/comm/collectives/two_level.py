"""Two-level reduction: within the node, between the nodes, within the node. One function for every backend.

Each element leaves a node once, and the node's ranks share that work, instead of once from every rank. Source: Jia et
al. 2018, arXiv:1807.11205; Mikami et al. 2018, arXiv:1811.05233 (the 2-D torus is the same scheme over two axes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain.comm.interface.communicator import Collective, World
from hpctrain.errors import CommunicationError, TopologyError
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevel:
    """The two communicators of one rank.

    local: the ranks of this node. cross: the ranks with this local index on every node, or None where some
    node has no such rank. num_slices: ranks on the smallest node, the number of `cross` groups.
    """

    local: Collective
    cross: Collective | None
    num_slices: int

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sums `buffer`, shape (n,), over all ranks, in place. Collective over the world; see
        `all_reduce_hierarchical`."""
        all_reduce_hierarchical(buffer, local=self.local, cross=self.cross, num_slices=self.num_slices)

    def close(self) -> None:
        """Frees both communicators; see `Collective.close`."""
        self.local.close()
        if self.cross is not None:
            self.cross.close()

    def elements_between_nodes(self, num_elems: int) -> int:
        """Returns how many elements this rank sends to other nodes for a buffer of `num_elems`, with a ring over nodes.

        Not collective.
        """
        if self.cross is None or self.cross.num_ranks == 1:
            return 0
        # A rank alone on its node sends the whole buffer.
        num_parts = 1 if self.local.num_ranks == 1 else self.num_slices
        counts = split_evenly(num_elems, num_parts=num_parts)
        return 2 * counts[self.local.rank] * (self.cross.num_ranks - 1) // self.cross.num_ranks


def make_two_level(world: World, topology: Topology) -> TwoLevel:
    """Makes the communicators for two-level reduction over `topology`. Collective over `world`.

    Raises TopologyError on every rank when topology and world have different numbers of ranks.
    """
    if topology.num_ranks != world.num_ranks:
        raise TopologyError(
            f"the topology places {topology.num_ranks} ranks ({topology.describe()}), "
            f"the world has {world.num_ranks}: make it from the node names of all ranks",
            agreed=True,
        )
    node_groups = topology.groups("node")
    local = world.split(topology.groups("local"))
    cross = world.split(node_groups)
    if local is None:
        raise CommunicationError(f"rank {world.rank} is not on any node of {topology.describe()}")
    return TwoLevel(local=local, cross=cross, num_slices=len(node_groups))


def all_reduce_hierarchical(
    buffer: torch.Tensor, *, local: Collective, cross: Collective | None, num_slices: int
) -> None:
    """Sums `buffer` over all ranks, in place. Collective over `local` and `cross`.

    buffer: shape (n,), any dtype the backend sums; same n and dtype on every rank; n may be 0, or less than
    `num_slices`. float16 is rounded twice, within the node and between nodes, instead of once by a flat sum.
    Bytes leaving a node: 2 (C-1)/C * n * itemsize with C nodes, through `num_slices` ranks at once.
    Nodes may have unequal rank counts: ranks without a counterpart on every node only take part within their node.
    Raises BufferMismatch if n or dtype differ and the backend detects it.
    """
    if cross is not None and cross.num_ranks == 1:
        local.all_reduce(buffer)  # one node
        return
    if local.num_ranks == 1:
        if cross is None:
            raise CommunicationError(
                f"rank {local.members[0]} is alone on its node and has no cross-node group"
            )
        cross.all_reduce(buffer)  # one rank on this node: its slice is the whole buffer
        return
    # Slices only for the first ranks of the node, which have a counterpart on every node.
    counts = split_evenly(buffer.numel(), num_parts=num_slices)
    counts += [0] * (local.num_ranks - num_slices)
    part = local.reduce_scatter(buffer, counts=counts)
    if cross is not None:
        cross.all_reduce(part)
    buffer.copy_(local.all_gather(part, counts=counts))
