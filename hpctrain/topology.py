"""Placement of the ranks on nodes, and the mesh of named axes over the ranks. Nothing here communicates.

The mesh has two axes: `node` (ranks with the same local index on different nodes) and `local` (the ranks of
one node). Two-level reduction uses one after the other. Callers ask for an axis by name, so that further axes can be
added without changing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Topology:
    """Placement of the ranks. `ranks_by_node[k]` holds the world ranks on node k, ascending.

    `node_of_rank[rank]` and `local_rank_of_rank[rank]` hold the inverse, for lookup in constant time.
    """

    ranks_by_node: tuple[tuple[int, ...], ...]
    node_names: tuple[str, ...]
    emulated: bool = False  # the nodes are groups of ranks on one machine (--ranks-per-node)
    node_of_rank: tuple[int, ...] = field(init=False, repr=False, compare=False)
    local_rank_of_rank: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.ranks_by_node for rank in node)
        if ranks != list(range(len(ranks))) or not ranks:
            raise TopologyError(f"ranks on the nodes are {ranks}, not 0 to {len(ranks) - 1} each once")
        if len(self.node_names) != len(self.ranks_by_node):
            raise TopologyError(f"{len(self.node_names)} node names for {len(self.ranks_by_node)} nodes")
        nodes, local_ranks = [0] * len(ranks), [0] * len(ranks)
        for node, on_node in enumerate(self.ranks_by_node):
            for local_rank, rank in enumerate(on_node):
                nodes[rank], local_ranks[rank] = node, local_rank
        object.__setattr__(self, "node_of_rank", tuple(nodes))
        object.__setattr__(self, "local_rank_of_rank", tuple(local_ranks))

    @classmethod
    def from_node_names(cls, names_by_rank: Sequence[str], *, emulated: bool = False) -> Topology:
        """Builds the topology from the node name of each world rank. Nodes are in the order of their first ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names_by_rank):
            ranks.setdefault(name, []).append(rank)
        return cls(tuple(tuple(r) for r in ranks.values()), tuple(ranks), emulated)

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_by_node)

    def node_of(self, rank: int) -> int:
        """Index of the node that `rank` is on. Raises TopologyError if `rank` is out of range."""
        return self.node_of_rank[self._checked(rank)]

    def local_rank_of(self, rank: int) -> int:
        """Index of `rank` among the ranks of its node. Raises TopologyError if `rank` is out of range."""
        return self.local_rank_of_rank[self._checked(rank)]

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(f"rank {rank} is not one of the {self.num_ranks} ranks of this run")
        return rank

    def local_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of the `local` axis: the ranks of each node."""
        return self.ranks_by_node

    def node_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of the `node` axis: the i-th rank of every node, for each i that every node has.

        With unequal ranks per node there are as many groups as the smallest node has ranks. A rank with a larger
        local index is in no group; other ranks of its node reduce that node's slices between nodes.
        """
        smallest = min(len(ranks) for ranks in self.ranks_by_node)
        return tuple(tuple(ranks[i] for ranks in self.ranks_by_node) for i in range(smallest))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of world ranks along `axis`, `node` or `local`. Raises TopologyError for another name."""
        by_axis = {"node": self.node_groups, "local": self.local_groups}
        if axis not in by_axis:
            raise TopologyError(f"the mesh has no axis {axis!r}; it has {', '.join(sorted(by_axis))}")
        return by_axis[axis]()

    def describe(self) -> str:
        """For example `2 nodes x 2 ranks` or `2 nodes with 3 and 1 ranks`, with ` (emulated)` appended if they are."""
        sizes = [len(ranks) for ranks in self.ranks_by_node]
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        if len(set(sizes)) == 1:
            text = f"{nodes} x {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
        else:
            text = f"{nodes} with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
        return text + (" (emulated)" if self.emulated else "")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh for one rank: the group that contains the rank, and the rank's index in that group."""

    name: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The named axes of the mesh for `rank`."""

    topology: Topology
    rank: int

    def axis(self, name: str) -> Axis | None:
        """The axis `node` or `local`; None when this rank is in no group of it (unequal ranks per node)."""
        groups = self.topology.groups(name)
        node, local_rank = self.topology.node_of(self.rank), self.topology.local_rank_of(self.rank)
        group, index = (node, local_rank) if name == "local" else (local_rank, node)
        return Axis(name, groups[group], index) if group < len(groups) else None
