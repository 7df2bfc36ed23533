"""Which node reads which block of samples: the ranks of a global batch are given what their node has near.

A global batch stays the same set of samples; within it the samples go to the node that is at home in their
block (it has the block in its page cache, or staged), as far as each rank keeps the number of samples that is
its share. Pure planning: every rank computes the same, nothing communicates.

The cost of a batch is that of the whole global batch on every rank: about 0.1 ms for each 1000 samples. That suits
global batches of up to some ten thousand samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import rank_share
from hpctrain.errors import DataError, RecipeError
from hpctrain.topology import Topology


class Positions(Protocol):
    """What is needed of an order of samples."""

    @property
    def num_samples(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def at(self, start: int, stop: int) -> NDArray[np.int64]: ...


@dataclass(frozen=True, kw_only=True)
class NodeBlocks:
    """Blocks of consecutive samples, and the node that is at home in each.

    starts: first sample of each block, ascending, from 0; shape (num_blocks,).
    homes: the node of each block, shape (num_blocks,).
    """

    starts: NDArray[np.int64]
    homes: NDArray[np.int64]
    topology: Topology

    def __post_init__(self) -> None:
        if len(self.starts) == 0 or len(self.starts) != len(self.homes) or int(self.starts[0]) != 0:
            raise DataError(
                f"{len(self.starts)} blocks with {len(self.homes)} homes: every block needs one, "
                "and the first begins at sample 0"
            )
        if bool((np.diff(self.starts) <= 0).any()):
            raise DataError("blocks must begin one after the other, each with at least one sample")
        if int(self.homes.min()) < 0 or int(self.homes.max()) >= self.topology.num_nodes:
            raise DataError(f"blocks have homes outside the {self.topology.num_nodes} nodes of the run")

    @classmethod
    def plan(cls, starts: NDArray[np.int64], *, topology: Topology) -> NodeBlocks:
        """The same home in every epoch, dealt in turn, to each node as many as its ranks' share.

        Neighbouring blocks go to different nodes: also those that an order reads one after the other.
        """
        numbers = np.arange(len(starts), dtype=np.int64)
        # Block b goes to the node of rank b mod num_ranks, the ranks taken alternately from the nodes.
        dealt = sorted(
            (local / len(ranks), node)
            for node, ranks in enumerate(topology.ranks_by_node)
            for local in range(len(ranks))
        )
        node_of_turn = np.array([node for _, node in dealt], dtype=np.int64)
        homes = node_of_turn[numbers % len(node_of_turn)]
        return cls(starts=np.asarray(starts, dtype=np.int64), homes=homes, topology=topology)

    def blocks_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def assign(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of a global batch's samples in the order of the ranks: shape (n,), a permutation of 0 ... n - 1.

        samples: the global batch, shape (n,). In samples[assign(samples)] the shares of the ranks (see
        `rank_share`) follow each other, and each holds as many samples as possible from blocks of the rank's
        node: no other assignment with these shares has more. Samples keep their order within a node.
        """
        total, topology = len(samples), self.topology
        shares = [
            rank_share(0, total, rank=rank, num_ranks=topology.num_ranks)
            for rank in range(topology.num_ranks)
        ]
        homes = self.homes[self.blocks_of(samples)]
        taken, left_over = [], []
        room = []
        for node, ranks in enumerate(topology.ranks_by_node):
            wanted = np.flatnonzero(homes == node)
            capacity = sum(shares[rank].num_samples for rank in ranks)
            taken.append(wanted[:capacity])
            left_over.append(wanted[capacity:])
            room.append(capacity - len(taken[-1]))
        # What has no room at home goes where room is left, in the order of the batch.
        rest = np.sort(np.concatenate(left_over))
        edges = np.cumsum([0, *room])
        places = np.empty(total, dtype=np.int64)
        for node, ranks in enumerate(topology.ranks_by_node):
            mine = np.sort(np.concatenate([taken[node], rest[edges[node] : edges[node + 1]]]))
            used = 0
            for rank in ranks:
                share = shares[rank]
                places[share.start : share.stop] = mine[used : used + share.num_samples]
                used += share.num_samples
        return places


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """An order in which the samples of each global batch stand by node: a loader needs nothing else.

    order: the order of the epoch. global_batch: as in the loader. first: position of the epoch where the
    loader's first batch begins (where a resumed run goes on).
    Each global batch is the same set of samples as without it.
    """

    order: Positions
    blocks: NodeBlocks
    global_batch: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.global_batch < 1 or not 0 <= self.first <= self.order.num_samples:
            raise RecipeError(
                f"global batches of {self.global_batch} samples from position {self.first} of "
                f"{self.order.num_samples}: at least 1 sample, from a position of the epoch, is needed"
            )

    @property
    def num_samples(self) -> int:
        return self.order.num_samples

    @property
    def epoch(self) -> int:
        return self.order.epoch

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample indices at positions start, ..., stop - 1: int64, shape (stop - start,).

        Positions before `first` are as in `order`. Raises DataError if the span leaves the epoch.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise DataError(
                f"positions {start} to {stop} were asked of an epoch of {self.num_samples} samples"
            )
        parts = []
        if start < self.first:
            parts.append(self.order.at(start, min(stop, self.first)))
            start = min(stop, self.first)
        while start < stop:
            begin = start - (start - self.first) % self.global_batch
            end = min(begin + self.global_batch, self.num_samples)
            samples = self.order.at(begin, end)
            placed = samples[self.blocks.assign(samples)]
            parts.append(placed[start - begin : min(stop, end) - begin])
            start = min(stop, end)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Locality:
    """What an assignment comes to.

    at_home: share of the samples (all have the same size, so of the bytes too) that a rank of their block's
    home reads. nodes_per_block: nodes that read a block, mean over the blocks that are read; 1 is the least.
    """

    at_home: float
    nodes_per_block: float


def measure(batches: Iterable[NDArray[np.int64]], *, blocks: NodeBlocks) -> Locality:
    """Locality of global batches whose samples stand in the order of the ranks, as `NodeOrder` gives them."""
    topology = blocks.topology
    node_of_rank = np.array(topology.node_of_rank, dtype=np.int64)
    home, total = 0, 0
    readers: set[tuple[int, int]] = set()
    for samples in batches:
        counts = [
            rank_share(0, len(samples), rank=rank, num_ranks=topology.num_ranks).num_samples
            for rank in range(topology.num_ranks)
        ]
        nodes = np.repeat(node_of_rank, counts)
        found = blocks.blocks_of(samples)
        home += int((blocks.homes[found] == nodes).sum())
        total += len(samples)
        pairs = np.unique(np.stack([found, nodes], axis=1), axis=0)
        readers.update((int(block), int(node)) for block, node in pairs)
    read = {block for block, _ in readers}
    return Locality(at_home=home / max(1, total), nodes_per_block=len(readers) / max(1, len(read)))
