"""Two-level reduction: within the node, between the nodes, within the node. One function for every backend.

Between nodes only one copy of each element leaves a node, spread over its ranks, instead of one from every
rank. Source: Jia et al. 2018, arXiv:1807.11205; Mikami et al. 2018, arXiv:1811.05233 (the 2-D torus is the
same walk over two axes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain.comm.interface.buffer_checks import balanced_counts
from hpctrain.comm.interface.communicator import Collective, World
from hpctrain.errors import CommunicationError, TopologyError
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
        """Sum `buffer` over all ranks, in place. Collective over the world; see `all_reduce_hierarchical`."""
        all_reduce_hierarchical(buffer, local=self.local, cross=self.cross, num_slices=self.num_slices)

    def elements_between_nodes(self, num_elems: int) -> int:
        """Elements that this rank sends to other nodes for a buffer of `num_elems`: its slice, in a ring over them.

        Not collective.
        """
        if self.cross is None or self.cross.num_ranks == 1:
            return 0
        # A rank alone on its node carries the whole of it.
        num_parts = 1 if self.local.num_ranks == 1 else self.num_slices
        counts = balanced_counts(num_elems, num_parts=num_parts)
        return 2 * counts[self.local.rank] * (self.cross.num_ranks - 1) // self.cross.num_ranks


def make_two_level(world: World, topology: Topology) -> TwoLevel:
    """The communicators for two-level reduction over `topology`. Collective over `world`.

    TopologyError on every rank when the topology is not of as many ranks as the world.
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
        raise CommunicationError(f"rank {world.rank} is on no node of {topology.describe()}")
    return TwoLevel(local=local, cross=cross, num_slices=len(node_groups))


def all_reduce_hierarchical(
    buffer: torch.Tensor, *, local: Collective, cross: Collective | None, num_slices: int
) -> None:
    """Sum `buffer` over all ranks, in place. Collective over `local` and `cross`.

    buffer: shape (n,), any dtype the backend sums; same n and dtype on every rank; n may be 0, or less than
    `num_slices`. float16 is rounded once more than by a flat sum: after the node, and after the nodes.
    Bytes leaving a node: 2 (C-1)/C * n * itemsize with C nodes, through `num_slices` ranks at once.
    Nodes may have unequal rank counts: the ranks beyond the smallest node's take part within their node only.
    Raises BufferMismatch, where the backend tells, if n or dtype differ.
    """
    if cross is not None and cross.num_ranks == 1:
        local.all_reduce(buffer)  # one node
        return
    if local.num_ranks == 1:
        if cross is None:
            raise CommunicationError(f"rank {local.members[0]} is alone on its node and in no group of nodes")
        cross.all_reduce(buffer)  # one rank on this node: it carries its node's only slice
        return
    # Slices for the first ranks of the node, those that have a counterpart on every node.
    counts = balanced_counts(buffer.numel(), num_parts=num_slices)
    counts += [0] * (local.num_ranks - num_slices)
    part = local.reduce_scatter(buffer, counts=counts)
    if cross is not None:
        cross.all_reduce(part)
    buffer.copy_(local.all_gather(part, counts=counts))
