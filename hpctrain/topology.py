"""Placement of the ranks on nodes, and named axes over the ranks along which groups of ranks communicate.

`Mesh` has the two axes of two-level reduction: `node` (ranks with the same local index on different nodes) and
`local` (the ranks of one node). `ParallelMesh` has the four axes of a model that is split over the ranks. Nothing in
this module communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np

from hpctrain.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Topology:
    """Placement of the ranks on nodes.

    ranks_by_node: world ranks on each node, ascending.
    node_names: name of each node, in the order of `ranks_by_node`.
    emulated: True if the nodes are groups of ranks on one machine (`--ranks-per-node`).
    node_of_rank: index of the node of each world rank, for lookup in constant time; computed if not given.

    Raises TopologyError unless each rank from 0 to N - 1 is on exactly one node and there is one name per node. These
    checks are skipped if `node_of_rank` is given.
    """

    ranks_by_node: tuple[tuple[int, ...], ...]
    node_names: tuple[str, ...]
    emulated: bool = False  # the nodes are groups of ranks on one machine (--ranks-per-node)
    node_of_rank: tuple[int, ...] = field(default=(), repr=False, compare=False)  # computed, if not given

    def __post_init__(self) -> None:
        if self.node_of_rank:
            return
        sizes = np.array(list(map(len, self.ranks_by_node)), dtype=np.int64)
        ranks = np.fromiter(chain.from_iterable(self.ranks_by_node), dtype=np.int64, count=int(sizes.sum()))
        if not len(ranks) or not np.array_equal(np.sort(ranks), np.arange(len(ranks))):
            raise TopologyError(
                f"the nodes hold the ranks {sorted(ranks.tolist())}, not 0 to {len(ranks) - 1}: put each rank on "
                "exactly one node"
            )
        if len(self.node_names) != len(self.ranks_by_node):
            raise TopologyError(
                f"{len(self.node_names)} node names for {len(self.ranks_by_node)} nodes: give one name per node"
            )
        nodes = np.empty_like(ranks)
        nodes[ranks] = np.repeat(np.arange(len(sizes)), sizes)
        object.__setattr__(self, "node_of_rank", tuple(nodes.tolist()))

    @classmethod
    def from_node_names(cls, names_by_rank: Sequence[str], *, emulated: bool = False) -> Topology:
        """Builds the topology from the node name of each world rank. Nodes are ordered by their lowest rank."""
        names = tuple(dict.fromkeys(names_by_rank))
        number_of = {name: number for number, name in enumerate(names)}
        node_of_rank = tuple(map(number_of.__getitem__, names_by_rank))
        nodes = np.array(node_of_rank, dtype=np.int64)
        by_node = np.argsort(nodes, kind="stable").tolist()
        ends = np.cumsum(np.bincount(nodes, minlength=len(names))).tolist()
        groups = (tuple(by_node[first:end]) for first, end in pairwise([0, *ends]))
        return cls(tuple(groups), names, emulated, node_of_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_by_node)

    def node_of(self, rank: int) -> int:
        """Returns the index of the node on which `rank` runs. Raises TopologyError if `rank` is out of range."""
        return self.node_of_rank[self._checked(rank)]

    def local_rank_of(self, rank: int) -> int:
        """Returns the index of `rank` among the ranks of its node. Raises TopologyError if `rank` is out of range."""
        return self.ranks_by_node[self.node_of(rank)].index(rank)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(f"rank {rank} is not one of the {self.num_ranks} ranks of this run")
        return rank

    def local_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of the `local` axis: one group per node, with all ranks of that node."""
        return self.ranks_by_node

    def node_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of the `node` axis: for each local index, the ranks with this index on their nodes.

        If the nodes have different numbers of ranks, there are as many groups as the smallest node has ranks. Ranks
        with a larger local index belong to no group; in two-level reduction, these ranks do not exchange data with
        other nodes.
        """
        smallest = min(len(ranks) for ranks in self.ranks_by_node)
        return tuple(tuple(ranks[i] for ranks in self.ranks_by_node) for i in range(smallest))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of world ranks along the axis `node` or `local`. Raises TopologyError for another name."""
        by_axis = {"node": self.node_groups, "local": self.local_groups}
        if axis not in by_axis:
            raise TopologyError(f"the mesh has no axis {axis!r}; it has {', '.join(sorted(by_axis))}")
        return by_axis[axis]()

    def describe(self) -> str:
        """Returns a text such as `2 nodes x 2 ranks` or `2 nodes with 3 and 1 ranks`.

        For emulated nodes, "(emulated)" is appended.
        """
        sizes = [len(ranks) for ranks in self.ranks_by_node]
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        if len(set(sizes)) == 1:
            text = f"{nodes} x {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
        else:
            text = f"{nodes} with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
        return text + (" (emulated)" if self.emulated else "")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, as one rank sees it.

    ranks: world ranks of the group that contains this rank.
    index: index of this rank in the group.
    """

    name: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The two axes `node` and `local`, with the groups to which the rank `rank` belongs."""

    topology: Topology
    rank: int

    def axis(self, name: str) -> Axis | None:
        """Returns the axis of this name, `node` or `local`.

        Returns None if this rank belongs to no group along that axis, because nodes have different numbers of ranks.
        """
        groups = self.topology.groups(name)
        node, local_rank = self.topology.node_of(self.rank), self.topology.local_rank_of(self.rank)
        group, index = (node, local_rank) if name == "local" else (local_rank, node)
        return Axis(name, groups[group], index) if group < len(groups) else None


PARALLEL_AXES = ("pipeline", "node", "local", "tensor")


@dataclass(frozen=True, slots=True)
class ParallelMesh:
    """World ranks arranged on the axes pipeline x node x local x tensor.

    Ranks that differ only in their node and local indices are data parallel: they hold the same part of the model.

    ranks: world rank at each index [stage][node][local][tensor]. A tensor group always lies on one node.
    by_node: True if each entry [stage][node] of `ranks` holds ranks of one node only. False if `plan` could not arrange
    the ranks in this way: the `node` axis then has size 1.
    """

    ranks: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    by_node: bool = True

    @classmethod
    def plan(cls, topology: Topology, *, pipeline: int = 1, tensor: int = 1) -> ParallelMesh:
        """Arranges the ranks on the axes pipeline x node x local x tensor.

        A tensor group consists of adjacent ranks of one node, and a pipeline stage of consecutive ranks. The
        data-parallel ranks of a stage are on the axes `node` and `local`. The `node` axis has size 1 if the nodes have
        different numbers of ranks, or if a stage fills neither whole nodes nor an equal part of one node.

        Raises TopologyError if `pipeline` or `tensor` is less than 1, if `tensor` does not divide the number of ranks
        on each node, or if `pipeline` * `tensor` does not divide the number of all ranks.
        """
        cls.check(topology, pipeline=pipeline, tensor=tensor)
        in_order = np.concatenate([np.array(ranks, dtype=np.int64) for ranks in topology.ranks_by_node])
        per_stage = topology.num_ranks // (pipeline * tensor)
        sizes = {len(ranks) for ranks in topology.ranks_by_node}
        local = min(per_stage, min(sizes) // tensor)
        by_node = len(sizes) == 1 and per_stage % local == 0 and min(sizes) // tensor % local == 0
        grid = (
            in_order.reshape(pipeline, per_stage // local, local, tensor)
            if by_node
            else (in_order.reshape(pipeline, 1, per_stage, tensor))
        )
        stages = (tuple(tuple(map(tuple, node)) for node in stage) for stage in grid.tolist())
        return cls(tuple(stages), by_node)

    @staticmethod
    def check(topology: Topology, *, pipeline: int = 1, tensor: int = 1) -> None:
        """Raises TopologyError if `plan` would do so for the same arguments. Does not arrange any ranks."""
        for name, size in (("pipeline", pipeline), ("tensor", tensor)):
            if size < 1:
                raise TopologyError(f"{name} is {size}: give at least 1")
        for node, ranks in enumerate(topology.ranks_by_node):
            if len(ranks) % tensor:
                raise TopologyError(
                    f"tensor = {tensor} does not divide the {len(ranks)} ranks on {topology.node_names[node]}: a "
                    f"tensor group lies on one node. Start a multiple of {tensor} ranks on each node"
                )
        if (topology.num_ranks // tensor) % pipeline:
            raise TopologyError(
                f"{topology.num_ranks} ranks cannot be split into pipeline = {pipeline} stages of tensor = {tensor}: "
                f"start a multiple of {pipeline * tensor} ranks"
            )

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, by name."""
        return dict(zip(PARALLEL_AXES, np.array(self.ranks).shape, strict=True))

    def places(self) -> dict[int, dict[str, int]]:
        """Returns a map from each world rank to its indices on the axes `pipeline`, `data` and `tensor`."""
        found: dict[int, dict[str, int]] = {}
        for stage, nodes in enumerate(self.ranks):
            groups = [group for node in nodes for group in node]
            for place, group in enumerate(groups):
                for index, rank in enumerate(group):
                    found[rank] = {"pipeline": stage, "data": place, "tensor": index}
        return found

    def data_axis(self, rank: int) -> Axis:
        """Returns the axis of the ranks that are data parallel to `rank`: ranks with the same stage and tensor index.

        All ranks of one tensor group have the same index on this axis.
        """
        grid = np.array(self.ranks)
        stage, node, local, tensor = (int(place[0]) for place in np.nonzero(grid == rank))
        ranks = grid[stage, :, :, tensor].ravel().tolist()
        return Axis("data", tuple(ranks), node * grid.shape[2] + local)

    def pipeline_axis(self, rank: int) -> Axis:
        """Returns the axis of the ranks that differ from `rank` only in their stage; `index` is the stage of `rank`.

        These ranks together hold all pipeline stages of one copy of the model, or of one tensor-parallel part of the
        copy.
        """
        grid = np.array(self.ranks)
        stage, node, local, tensor = (int(place[0]) for place in np.nonzero(grid == rank))
        return Axis("pipeline", tuple(grid[:, node, local, tensor].tolist()), stage)

    def tensor_axis(self, rank: int) -> Axis:
        """Returns the tensor group of `rank` as an axis. `index` of the axis is the index of `rank` in the group."""
        group = next(group for stage in self.ranks for node in stage for group in node if rank in group)
        return Axis("tensor", group, group.index(rank))

    def data_ranks(self, *, stage: int = 0, tensor: int = 0) -> tuple[int, ...]:
        """Returns the data-parallel ranks of one stage and tensor index, ascending."""
        return tuple(sorted(group[tensor] for node in self.ranks[stage] for group in node))

    def data_grid(self, *, stage: int = 0, tensor: int = 0) -> tuple[tuple[int, ...], ...]:
        """Returns the data-parallel ranks of one stage and tensor index, grouped by node.

        Raises TopologyError if the ranks could not be arranged by node (`by_node` is False).
        """
        if not self.by_node:
            raise TopologyError(
                "shard_within = 'node' needs equally many ranks on every node, each of which holds a whole replica. "
                "Start the same number on each, or use shard_within = 'world'"
            )
        return tuple(tuple(group[tensor] for group in node) for node in self.ranks[stage])
