"""Which samples a rank computes: its place on the data axis. Nothing here communicates."""

from __future__ import annotations

from typing import final

from hpctrain.errors import UsageError
from hpctrain.topology import Axis, ParallelMesh, Topology


@final
class RankAxes:
    """The axes of a run for one rank. At first all ranks are data parallel."""

    def __init__(self, topology: Topology, *, rank: int) -> None:
        self._topology = topology
        self._rank = rank
        self._mesh: ParallelMesh | None = None
        self._used = False

    @property
    def data(self) -> Axis:
        """The ranks that train on different samples, and this rank's index among them. All ranks, unless layers are
        split: then the ranks of one tensor group have the same index, and train on the same samples."""
        if self._mesh is None:
            return Axis("data", tuple(range(self._topology.num_ranks)), self._rank)
        return self._mesh.data_axis(self._rank)

    @property
    def counts_samples(self) -> bool:
        """True on one rank of each tensor group: what is summed over samples counts there, and is 0 on the others."""
        return self._mesh is None or self._mesh.tensor_axis(self._rank).index == 0

    def arrange(self, *, tensor: int) -> None:
        """Places the ranks on the axes data and tensor. tensor: the ranks of a tensor group.

        Raises TopologyError, on every rank, if that does not divide the ranks of each node; UsageError if a loader was
        made for other axes.
        """
        if tensor == (1 if self._mesh is None else self._mesh.shape["tensor"]):
            return
        if self._used:
            raise UsageError(
                f"tensor = {tensor} changes which ranks train on the same samples, but a loader was made already: call "
                "session.parallelize before session.loader"
            )
        self._mesh = ParallelMesh.plan(self._topology, tensor=tensor)

    def for_loader(self) -> Axis:
        """Returns the data axis for a loader, after which it stays as it is."""
        self._used = True
        return self.data
