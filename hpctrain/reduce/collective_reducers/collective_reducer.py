"""Sums buckets by a backend's collective operations: flat, by slices, or in two levels.

Available for every backend, on the backend's device. If its operations only block, one bucket is in flight at a time.
`EngineReducer` makes its own schedule instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, final

import torch

from hpctrain.comm import Collective, TwoLevel, all_gather_json, check_same
from hpctrain.errors import BufferMismatch, UsageError
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
from hpctrain.reduce.contract.bucket_reducer import Finishing, Numbers, Reduced, Shapes, StateTensor
from hpctrain.reduce.contract.plan_agreement import check_same_plan
from hpctrain.reduce.contract.step_end import StepEnd
from hpctrain.topology import Topology

# Of all buckets: up to here each rank computes the norm of the sums alone, which takes less time than a collective.
MAX_NORM_ALONE_BYTES = 16 << 20


class BucketSum(Protocol):
    """A method of summing a bucket over all ranks. `start` is collective, `plan` is not.

    bytes_sent: bytes sent to other nodes so far. start(number, memory): starts the sum of bucket `number`, in place in
    `memory`, shape (n,), n > 0; returns a function that waits for it.
    """

    bytes_sent: int

    @property
    def wire(self) -> str: ...

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None: ...

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]: ...


@final
class CollectiveReducer(StepEnd):
    """`BucketReducer` over the collective operations of `comm`, which no other object may use.

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
        """on_close: releases `comm`; collective, called by `close`. in_background: see `InBackground`."""
        self._comm = comm
        self._in_background = in_background
        self._on_close: Callable[[], object] | None = on_close
        self._algorithm = algorithm
        self._sums = sums
        self._residuals = residuals
        self._memory: list[torch.Tensor] = []
        self._norm_alone = False

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
        """Returns a reducer that uses the backend's all-reduce of the whole bucket. Not collective.

        name: value of `algorithm`, if the backend is configured for another one (`nccl-torus`). `bytes_sent` is
        computed for a ring. fp16 is summed in float16 by Horovod; by the other backends in float32, by slices, for
        which `bytes_sent` is then computed. Raises UsageError if the backend cannot sum this wire format.
        """
        num_ranks = comm.num_ranks
        elsewhere = successor_is_elsewhere(comm.rank, num_ranks=num_ranks, topology=topology)
        far = num_ranks_elsewhere(comm.rank, num_ranks=num_ranks, topology=topology)

        def bytes_of(numel: int, itemsize: int) -> int:
            if itemsize < 4 and comm.backend != "horovod":
                return 2 * numel * itemsize * far // num_ranks
            return all_reduce_bytes(numel * itemsize, num_ranks=num_ranks) if elsewhere else 0

        sums = CastSum(comm.start_all_reduce, wire=wire, backend=comm.backend, bytes_of=bytes_of)
        # Horovod's thread continues sums that have been started; the other backends' operations only block.
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
        """Returns a reducer that sums within the node, between nodes and within the node by the backend's operations.

        levels: of `topology`, used by this reducer only. `bytes_sent` is computed for a ring over the nodes with this
        rank's slice. Not collective. Raises UsageError if the backend cannot sum this wire format.
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
        """Returns a reducer that sums by slices: see `sliced_sum`. Not collective. feedback: for a lossy codec."""
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
        self._will_finish(buckets, self._memory)
        small = sum(b.numel * b.dtype.itemsize for b in buckets) <= MAX_NORM_ALONE_BYTES
        self._norm_alone = self._in_background and device.type == "cpu" and small
        if self._norm_alone:  # other instructions may give other bits
            capabilities = all_gather_json(self._comm, torch.backends.cpu.get_cpu_capability())
            self._norm_alone = len(set(capabilities)) == 1
        return list(self._memory)

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        """Horovod's thread sums the numbers as one more tensor; each rank computes the norm of small buckets itself."""
        if not self._norm_alone or not len(numbers):
            return super().finish(numbers, comm=comm)
        wait = self._comm.start_all_reduce(torch.from_numpy(numbers), number=len(self._memory))
        return self._finish_alone(numbers, wait, comm=comm)

    def _finish_alone(self, numbers: Numbers, wait: Callable[[], None], *, comm: Collective) -> Finishing:
        try:
            wait()
        except BufferMismatch:  # Horovod reports it on every rank, but not which rank differs
            check_same(comm, name="how many numbers a step sums", value=len(numbers), error=BufferMismatch)
            raise
        square = self._squares.of_share(0, num_shares=1)
        yield True
        return Reduced(square, numbers)

    def in_background(self, number: int) -> bool:
        return self._in_background

    def reduce(self, number: int) -> Iterator[bool]:
        if not 0 <= number < len(self._memory):
            raise UsageError(f"no bucket {number} to reduce: {len(self._memory)} are planned")
        return self._reduce(number)

    def _reduce(self, number: int) -> Iterator[bool]:
        """Starts the sum in the first `next`, since backends match operations by order, and only the first turns of the
        reductions have the same order on every rank. Waits in the second, when the others in flight have started.
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

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return self._residuals.rows_to_load(shapes) if self._residuals is not None else {}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        if self._residuals is not None:
            self._residuals.load_state(tensors, shapes)

    def close(self) -> None:
        """Frees the memory and the communicator. Collective; a second call does nothing."""
        self._memory = []
        if self._on_close is not None:
            close, self._on_close = self._on_close, None
            close()
