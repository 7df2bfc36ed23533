"""Buckets summed by a backend's collective operations: flat, by slices, or in two levels.

These work wherever a backend works, and on the device where it does. Where its operations only block, one bucket is in
flight at a time. `engine` has a schedule of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, final

import torch

from hpctrain.comm import Collective, TwoLevel
from hpctrain.errors import UsageError
from hpctrain.reduce.codecs.codec import Codec
from hpctrain.reduce.codecs.error_feedback import Residuals
from hpctrain.reduce.collective_reducers import sliced_sum
from hpctrain.reduce.collective_reducers.cast_sum import CastSum
from hpctrain.reduce.collective_reducers.sliced_sum import SliceSum
from hpctrain.reduce.collective_reducers.traffic_bounds import (
    all_reduce_bytes,
    num_ranks_elsewhere,
    successor_is_elsewhere,
)
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import StateTensor
from hpctrain.reduce.contract.plan_agreement import check_same_plan
from hpctrain.topology import Topology


class BucketSum(Protocol):
    """One way to sum a bucket over all ranks."""

    bytes_sent: int

    @property
    def wire(self) -> str: ...

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None: ...

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]: ...


@final
class CollectiveReducer:
    """`BucketReducer` over the collective operations of `comm`, a message space of its own.

    Make it with `flat`, `direct` or `hierarchical`.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        algorithm: str,
        sums: BucketSum,
        residuals: Residuals | None = None,
        in_background: bool = False,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """on_close: gives `comm` back; called by `close`. Collective. in_background: see `InBackground`."""
        self._comm = comm
        self._in_background = in_background
        self._on_close: Callable[[], object] | None = on_close
        self._algorithm = algorithm
        self._sums = sums
        self._residuals = residuals
        self._memory: list[torch.Tensor] = []

    @classmethod
    def flat(
        cls,
        comm: Collective,
        *,
        topology: Topology,
        wire: str = "fp32",
        name: str = "flat",
        on_close: Callable[[], object] = lambda: None,
    ) -> CollectiveReducer:
        """The backend's all-reduce of the whole bucket.

        name: what it is called, where the backend was set to another algorithm (`nccl-torus`). `bytes_sent` is
        the ring's bound. fp16 is summed in float16 by Horovod; by the other backends in float32, by slices, and
        `bytes_sent` is what these take.
        """
        num_ranks = comm.num_ranks
        elsewhere = successor_is_elsewhere(comm.rank, num_ranks=num_ranks, topology=topology)
        far = num_ranks_elsewhere(comm.rank, num_ranks=num_ranks, topology=topology)

        def bytes_of(numel: int, itemsize: int) -> int:
            if itemsize < 4 and comm.backend != "horovod":
                return 2 * numel * itemsize * far // num_ranks
            return all_reduce_bytes(numel * itemsize, num_ranks=num_ranks) if elsewhere else 0

        sums = CastSum(comm.start_all_reduce, wire=wire, backend=comm.backend, bytes_of=bytes_of)
        # Horovod's thread sums what has been started; the other backends' operations only block.
        return cls(
            comm, algorithm=name, sums=sums, in_background=comm.backend == "horovod", on_close=on_close
        )

    @classmethod
    def hierarchical(
        cls,
        comm: Collective,
        *,
        levels: TwoLevel,
        topology: Topology,
        wire: str = "fp32",
        on_close: Callable[[], object] = lambda: None,
    ) -> CollectiveReducer:
        """Within the node, between nodes, within the node, by the backend's operations.

        levels: of `topology`, made for this reducer alone. `bytes_sent`: this rank's slice by the ring's bound
        over the nodes.
        """

        def bytes_of(numel: int, itemsize: int) -> int:
            return itemsize * levels.elements_between_nodes(numel)

        def start(buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
            levels.all_reduce(buffer)
            return lambda: None

        sums = CastSum(start, wire=wire, backend=comm.backend, bytes_of=bytes_of)
        return cls(comm, algorithm="hierarchical-flat", sums=sums, on_close=on_close)

    @classmethod
    def direct(
        cls,
        comm: Collective,
        *,
        topology: Topology,
        codec: Codec,
        feedback: bool = False,
        piece_elems: int = sliced_sum.PIECE_ELEMS,
    ) -> CollectiveReducer:
        """By slices, encoded by any codec: see `sliced_sum`. feedback: keep what a lossy codec loses."""
        residuals = None
        if feedback and not codec.exact and comm.num_ranks > 1:
            residuals = Residuals(rank=comm.rank, num_ranks=comm.num_ranks)
        sums = SliceSum(comm, codec=codec, topology=topology, residuals=residuals, piece_elems=piece_elems)
        return cls(comm, algorithm="direct", sums=sums, residuals=residuals)

    @property
    def algorithm(self) -> str:
        return self._algorithm

    @property
    def wire(self) -> str:
        return self._sums.wire

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        how = f"{self._algorithm}, {self.wire}{', fed back' if self._residuals is not None else ''}"
        check_same_plan(self._comm, buckets, how=how)
        self._sums.plan(buckets, device=device)
        self._memory = [torch.zeros(b.numel, dtype=b.dtype, device=device) for b in buckets]
        return list(self._memory)

    def in_background(self, number: int) -> bool:
        return self._in_background

    def reduce(self, number: int) -> Iterator[bool]:
        if not 0 <= number < len(self._memory):
            raise UsageError(f"no bucket {number} to reduce: {len(self._memory)} are planned")
        return self._reduce(number)

    def _reduce(self, number: int) -> Iterator[bool]:
        """Started in the first `next`, as backends match operations by their order, which only the beginnings keep.

        Waited for in the second one: what else may be in flight has been started by then.
        """
        finish = None
        if self._comm.num_ranks > 1 and self._memory[number].numel():
            finish = self._sums.start(number, self._memory[number])
        yield True
        if finish is not None:
            finish()

    def settle(self, *, applied: bool, rescale: float) -> None:
        if self._residuals is not None:
            self._residuals.settle(applied=applied, rescale=rescale)

    def bytes_sent(self) -> int:
        return self._sums.bytes_sent

    def state(self) -> list[StateTensor]:
        return self._residuals.state() if self._residuals is not None else []

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._residuals is not None:
            self._residuals.load_state(tensors)

    def close(self) -> None:
        """Give the memory and the communicator back. Collective; a second call does nothing."""
        self._memory = []
        if self._on_close is not None:
            close, self._on_close = self._on_close, None
            close()
