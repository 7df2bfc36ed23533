"""The groups of ranks that share parts of a model, and what messages within them are between nodes. Pure."""

from __future__ import annotations

from functools import cache
from typing import final

import numpy as np

from hpctrain.distributed import ParallelPlan
from hpctrain.reduce import Sent, gathered_in_a_ring
from hpctrain.topology import ParallelMesh, Topology


@final
class RankGroups:
    """The groups of one topology. Each is found once: there may be 100,000 ranks, and many ways to split a model."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        # By sizes of the axes pipeline and tensor, which decide where the ranks stand.
        self._mesh = cache(self._placed)
        self._ring_of = cache(self._gathered)
        self._far = cache(self._crossings)

    def mesh(self, plan: ParallelPlan) -> ParallelMesh:
        """Returns where the ranks stand. Raises TopologyError if they do not fit."""
        return self._mesh(plan.pipeline, plan.tensor)

    def num_data_ranks(self, plan: ParallelPlan) -> int:
        """Returns the number of ranks that compute different samples with the same stages and parts of layers."""
        return self._topology.num_ranks // (plan.pipeline * plan.tensor)

    def num_parts(self, plan: ParallelPlan) -> int:
        """Returns the number of ranks that share a copy of the parameters, or of their part of the layers."""
        if plan.shard != "parameters":
            return 1
        if plan.shard_within == "node":
            return len(self.mesh(plan).data_grid()[0])
        return self.num_data_ranks(plan)

    def ring(self, plan: ParallelPlan, *, place: int = 0, within: bool = False, across: bool = False) -> Sent:
        """Returns what a rank sends to gather a byte over the data-parallel ranks of the stage `place`.

        within: over those of one node. across: over one on each node.
        """
        return self._ring_of(plan.pipeline, plan.tensor, place, within, across)

    def far_messages(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Returns for each rank of a pipeline how many pipelines have the next rank on another node; after the last
        comes the first."""
        return self._far(plan.pipeline, plan.tensor)

    def _placed(self, pipeline: int, tensor: int) -> ParallelMesh:
        return ParallelMesh.plan(self._topology, pipeline=pipeline, tensor=tensor)

    def _gathered(self, pipeline: int, tensor: int, place: int, within: bool, across: bool) -> Sent:
        mesh = self._mesh(pipeline, tensor)
        if within:
            ranks = mesh.data_grid(stage=place)[0]
        elif across:
            ranks = tuple(node[0] for node in mesh.data_grid(stage=place))
        else:
            ranks = mesh.data_ranks(stage=place)
        return gathered_in_a_ring(1.0, ranks=ranks, topology=self._topology)

    def _crossings(self, pipeline: int, tensor: int) -> tuple[int, ...]:
        ranks = np.array(self._mesh(pipeline, tensor).ranks).reshape(pipeline, -1)
        nodes = np.array(self._topology.node_of_rank)[ranks]  # (pipeline, pipelines)
        return tuple((nodes != np.roll(nodes, -1, axis=0)).sum(axis=1).tolist())
