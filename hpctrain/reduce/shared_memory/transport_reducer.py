"""The base class of the reducers over a transport: message tags, the watchdog, error feedback, and closing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from hpctrain.comm import NUM_TAGS, Collective, Pending, Transport, is_true_everywhere
from hpctrain.reduce.codecs import Codec
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.shared_memory.inter_node import ChunkMemory, InterNodeResiduals
from hpctrain.reduce.shared_memory.shared_buckets import NodeMemory, TwoLevelPlace
from hpctrain.topology import Topology

# Memory of reductions that were aborted by an error. MPI and the node's other ranks may still write to it, so it is
# kept until the process ends.
_ABORTED: list[tuple[Transport, NodeMemory, ChunkMemory]] = []


class TransportReducer(ABC):
    """Base class of the reducers over a transport.

    comm: communicator of all ranks, used by `plan`, `load_state` and `close`.
    levels: topology of the run; for algorithms in one level, a topology with one rank per node.
    algorithm: name of the algorithm, as in the recipe.
    codec: codec of the gradients that are sent between nodes.
    feedback: True for error feedback with a lossy codec.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        comm: Collective,
        levels: Topology,
        algorithm: str,
        codec: Codec,
        feedback: bool,
    ) -> None:
        self._transport = transport
        self._comm = comm
        self._place = TwoLevelPlace.of(levels, rank=transport.rank)
        self._algorithm = algorithm
        self._codec = codec
        self._keeps_residuals = feedback and not codec.exact and levels.num_nodes > 1
        self._residuals: InterNodeResiduals | None = None  # belongs to the current plan
        self._memory = NodeMemory(transport, place=self._place)
        self._scratch = ChunkMemory()
        self._next_tag = 0
        self._num_in_flight = 0
        self._bytes_sent = 0

    @property
    def algorithm(self) -> str:
        return self._algorithm

    @property
    def wire(self) -> str:
        return self._codec.name

    def bytes_sent(self) -> int:
        """Returns the payload bytes that this rank has sent to other nodes so far. Not collective."""
        return self._bytes_sent

    def end_step(self, *, applied: bool, rescale: float) -> None:
        """Ends the step for error feedback: the values of the step count as sent only if the step was applied.

        applied: True if the step was applied; the same on every rank.
        rescale: the next step's loss scale divided by this step's.
        """
        if self._residuals is not None:
            self._residuals.end_step(applied=applied, rescale=rescale)

    def state(self) -> list[StateTensor]:
        """Returns this rank's encoding errors, which a checkpoint must hold; empty without error feedback."""
        return self._residuals.state() if self._residuals is not None else []

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """Returns the rows of a checkpoint's tensors that `load_state` needs on this rank.

        See `KeepsState.rows_to_load`.
        """
        if self._residuals is None:
            return {}
        return self._residuals.rows_to_load(shapes, rank=self._comm.rank, num_ranks=self._comm.num_ranks)

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Restores the encoding errors from a checkpoint; see `KeepsState.load_state`.

        Collective; call it after `plan`.
        """
        if self._residuals is not None:
            self._residuals.load_state(tensors, shapes, comm=self._comm)

    def close(self) -> None:
        """Frees memory and communicators. Collective."""
        if not is_true_everywhere(self._comm, self._num_in_flight == 0):
            _ABORTED.append((self._transport, self._memory, self._scratch))
            return
        self._forget_plan()
        self._residuals = None
        self._memory = NodeMemory(self._transport, place=self._place)
        self._transport.close()

    @abstractmethod
    def _forget_plan(self) -> None:
        """Drops all references to planned memory."""

    def _watched(self, turns: Iterator[bool], what: str) -> Iterator[bool]:
        """Runs the generator `turns` under the watchdog, whose deadline counts only the time in which `turns` waits.

        turns: generator like that of `BucketReducer.reduce`.

        what: description of the operation, for the watchdog's messages.
        """
        self._num_in_flight += 1
        self._transport.begun(what)
        try:
            for progressed in turns:
                if progressed:
                    self._transport.progressed()
                else:
                    self._transport.waits(what)
                yield progressed
            self._num_in_flight -= 1  # not after an abort, because messages may still arrive
        finally:
            self._transport.progressed()

    def _take_tags(self, num_tags: int) -> int:
        """Reserves `num_tags` message tags, and returns the first one.

        The tag is the same on every rank, because all ranks start the sums in the same order.
        """
        first = self._next_tag
        self._next_tag = (first + num_tags) % NUM_TAGS
        return first

    def _send(self, data: torch.Tensor, *, to: int, tag: int) -> Pending:
        topology = self._transport.topology
        if topology.node_of(to) != topology.node_of(self._transport.rank):
            self._bytes_sent += data.numel()
        return self._transport.send(data, to=to, tag=tag)
