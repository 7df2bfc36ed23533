"""Reduce-scatter in two levels: within the nodes, then between them. For equal parts, one a rank.

A node sends each element to another node once, not once from every rank. Source: Mikami et al. 2018,
arXiv:1811.05233, of which this is the first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from hpctrain.comm import Collective, TwoLevel
from hpctrain.reduce.codecs.codec import Codec
from hpctrain.reduce.codecs.registry import codec_named
from hpctrain.reduce.sharded.rank_order_sum import RankOrderSum
from hpctrain.topology import Topology


@final
class TwoLevelSum:
    """Sums within the node without loss, and sends the node's sums to other nodes encoded.

    Each element is added up over the ranks of a node in their order, then over the nodes in theirs. Bytes leaving a
    node: (C-1)/C of the values, encoded, with C nodes, through as many ranks as the smallest node has. Of unequal nodes
    the other ranks receive their parts from a rank of their node.

    levels: of `topology`, used by this object only. codec: of what is sent between nodes.
    """

    def __init__(self, levels: TwoLevel, *, topology: Topology, codec: Codec) -> None:
        self._local: Collective = levels.local
        self._within = RankOrderSum(levels.local, codec=codec_named("fp32"))
        self._between = RankOrderSum(levels.cross, codec=codec) if levels.cross is not None else None
        self._carriers = range(levels.num_slices)
        # The first ranks of a node carry the parts between nodes: [carrier][node] -> the ranks whose parts it carries.
        self._ranks = [
            [ranks[carrier :: levels.num_slices] for ranks in topology.ranks_by_node]
            for carrier in self._carriers
        ]
        self._order = torch.tensor(
            [rank for of_carrier in self._ranks for of_node in of_carrier for rank in of_node]
        )
        self._node = topology.node_of(levels.local.members[levels.local.rank])

    def reduce_scatter(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        """Writes this rank's part of the sum of `values`, shape (num_ranks * n,), into `out`, shape (n,).

        Collective over all ranks; blocks.
        """
        width, place = out.numel(), self._local.rank
        counts = [width * sum(map(len, of_carrier)) for of_carrier in self._ranks]
        counts += [0] * (self._local.num_ranks - len(counts))
        carried = torch.empty(counts[place], dtype=values.dtype)
        ordered = values.view(len(self._order), width)[self._order].view(-1)
        self._within.reduce_scatter(ordered, counts=counts, out=carried)
        mine = carried.new_empty(0)
        if self._between is not None:
            per_node = [width * len(of_node) for of_node in self._ranks[place]]
            mine = carried.new_empty(per_node[self._node])
            self._between.reduce_scatter(carried, counts=per_node, out=mine)
        out.copy_(self._delivered(mine, width=width))

    def _delivered(self, mine: torch.Tensor, *, width: int) -> torch.Tensor:
        """Returns this rank's part; on a node with more ranks than carriers these hand out what they have summed."""
        local, carriers = self._local, len(self._carriers)
        if local.num_ranks == carriers:
            return mine
        return local.all_to_all(
            mine,
            send_counts=self._widths(local.rank, width) if local.rank < carriers else [0] * local.num_ranks,
            receive_counts=[
                width if carrier == local.rank % carriers else 0 for carrier in range(local.num_ranks)
            ],
        )

    def _widths(self, carrier: int, width: int) -> Sequence[int]:
        carriers = len(self._carriers)
        return [width if rank % carriers == carrier else 0 for rank in range(self._local.num_ranks)]
