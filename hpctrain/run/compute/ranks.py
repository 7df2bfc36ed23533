"""Checks the number of ranks, sets their threads, and arranges them on the axes of a run."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import final

import torch

from hpctrain.errors import TopologyError, UsageError
from hpctrain.launch import RankIdentity
from hpctrain.topology import Axis, ParallelMesh, Topology


def check_num_ranks(identity: RankIdentity, *, ranks: int | None) -> None:
    """Raises TopologyError if `ranks` is given and differs from the number of ranks started."""
    if ranks is not None and identity.num_ranks != ranks:
        raise TopologyError(
            f"the recipe asks for {ranks} ranks, {identity.launcher} started {identity.num_ranks}: start it with "
            f"`hpctrain launch -n {ranks} -- ...`, mpirun -n {ranks} or srun --ntasks={ranks}, or change run.ranks"
        )


def set_torch_threads(asked: int | None, share: Fraction) -> None:
    """Sets the number of torch's threads: `asked`, else OMP_NUM_THREADS, else this rank's share of the cores."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, math.floor(share)))


# Which samples a rank computes: its index on the data axis. Does not communicate.


@final
class RankAxes:
    """The axes (pipeline, data, tensor) along which the ranks are arranged, as seen from one rank.

    Until `arrange` is called, all ranks are data parallel. No method communicates.
    """

    def __init__(self, topology: Topology, *, rank: int) -> None:
        self._topology = topology
        self._rank = rank
        self._mesh: ParallelMesh | None = None
        self._used = False

    @property
    def data(self) -> Axis:
        """The ranks that train on different samples, and this rank's index among them.

        If the model is split, the ranks of one tensor group or one pipeline train on the same samples and have the same
        index.
        """
        if self._mesh is None:
            return Axis("data", tuple(range(self._topology.num_ranks)), self._rank)
        return self._mesh.data_axis(self._rank)

    @property
    def counts_samples(self) -> bool:
        """True if this rank counts its samples in sums over samples; the other ranks add 0.

        One rank per tensor group counts the samples of the group. In a pipeline, only ranks on the last stage, which
        computes the loss, count samples.
        """
        if self._mesh is None:
            return True
        pipeline = self._mesh.pipeline_axis(self._rank)
        return self._mesh.tensor_axis(self._rank).index == 0 and pipeline.index == pipeline.size - 1

    @property
    def drawing(self) -> Axis:
        """The ranks that draw different random numbers, for dropout and the like.

        These are the ranks of the axis `data`, except that each pipeline stage draws its own numbers.
        """
        if self._mesh is None:
            return self.data
        stages = [self._mesh.data_axis(rank) for rank in self._mesh.pipeline_axis(self._rank).ranks]
        ranks = tuple(rank for stage in stages for rank in stage.ranks)
        return Axis(
            "drawing", ranks, self._mesh.pipeline_axis(self._rank).index * self.data.size + self.data.index
        )

    def places(self) -> dict[int, dict[str, int]]:
        """Returns the indices of each rank on the axes `pipeline`, `data` and `tensor`, by rank and by axis.

        The result is {} if all ranks are data parallel.
        """
        return {} if self._mesh is None else self._mesh.places()

    def arrange(self, *, tensor: int = 1, pipeline: int = 1) -> None:
        """Arranges the ranks on the axes pipeline, data and tensor.

        tensor: the number of ranks per tensor group.
        pipeline: the number of ranks that hold the stages of one copy of the model.

        Raises TopologyError if `pipeline` does not divide the number of ranks, or `tensor` does not divide the number
        of ranks of each node; UsageError if a loader was already made for other axes.
        """
        shape = {"tensor": 1, "pipeline": 1} if self._mesh is None else self._mesh.shape
        if (tensor, pipeline) == (shape["tensor"], shape["pipeline"]):
            return
        if self._used:
            what = f"tensor = {tensor}" if pipeline == 1 else f"pipeline = {pipeline}"
            raise UsageError(
                f"{what} changes which ranks train on the same samples, but a loader was made already: call "
                "session.parallelize before session.loader"
            )
        self._mesh = ParallelMesh.plan(self._topology, tensor=tensor, pipeline=pipeline)

    def for_loader(self) -> Axis:
        """Returns the data axis for a loader. From now on, `arrange` can no longer change the axes."""
        self._used = True
        return self.data
