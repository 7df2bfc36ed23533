"""Top-k reduction: only the largest gradients are sent (Aji and Heafield 2017, arXiv:1704.05021).

From each bucket, a rank sends only the elements with the largest absolute values, a fixed fraction of all, each with
its index. The ranks choose different elements, so the elements of all ranks are gathered, and every rank adds them up
in rank order. Elements that a rank has not sent, and rounding errors of the sent elements, are added to the next
gradient (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.codecs import Residuals
from hpctrain.reduce.collective_reducers.collective_reducer import (
    all_gather_bytes,
    all_reduce_bytes,
    successor_is_elsewhere,
)
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor, check_dtypes, check_same_plan
from hpctrain.reduce.contract.step_end import StepEnd
from hpctrain.topology import Topology

STEPS = "top_k/steps"
# Share of a bucket's elements that is sent.
FRACTION = 0.01
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKMessage:
    """Layout of one rank's message for one bucket: range, indices, values, flags, each at a multiple of 8 bytes.

    The range is one float64, the largest absolute value; the range is not finite if any of the rank's values is not
    finite. Each flag is one byte.

    count: number of elements that are sent.
    num_flags: number of flags.
    place_dtype: dtype of the indices, int32 if all indices fit into int32.
    value_dtype: dtype of the values.
    """

    count: int
    num_flags: int
    place_dtype: torch.dtype
    value_dtype: torch.dtype

    @classmethod
    def of(cls, bucket: Bucket, *, fraction: float, value_dtype: torch.dtype | None) -> TopKMessage:
        """Returns the layout for `bucket`. value_dtype: dtype of the values; None means the dtype of the bucket."""
        gradients = bucket.num_gradients
        return cls(
            count=math.ceil(fraction * gradients),
            num_flags=len(bucket.slots),
            place_dtype=torch.int32 if gradients <= 2**31 else torch.int64,
            value_dtype=value_dtype or bucket.dtype,
        )

    def _ends(self) -> tuple[int, int, int, int]:
        places = _ALIGNMENT + _aligned(self.count * self.place_dtype.itemsize)
        values = places + _aligned(self.count * self.value_dtype.itemsize)
        return _ALIGNMENT, places, values, values + _aligned(self.num_flags)

    @property
    def num_bytes(self) -> int:
        return self._ends()[-1]

    def parts(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns views of the range, indices, values and flags in `data`, uint8, shape (num_bytes,)."""
        first, second, third, _ = self._ends()
        return (
            data[:first].view(torch.float64),
            data[first : first + self.count * self.place_dtype.itemsize].view(self.place_dtype),
            data[second : second + self.count * self.value_dtype.itemsize].view(self.value_dtype),
            data[third : third + self.num_flags],
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class _Planned:
    bucket: Bucket
    memory: torch.Tensor
    message: TopKMessage
    data: torch.Tensor


@final
class TopKReducer(StepEnd):
    """`BucketReducer` that sends the largest elements of each bucket, with error feedback.

    Each bucket needs one all_gather, with one message per rank. The all_gather blocks, so buckets are reduced one after
    another. With N ranks and float32 values, every rank receives 8 * N * fraction bytes per element; with a float32
    ring, every rank receives 8 (N-1)/N bytes. So top-k receives fewer bytes if N * fraction < 1. The result is
    deterministic, and bitwise equal on every rank. If a bucket is not finite on any rank, the result is not finite on
    all ranks, and the residuals do not change (`end_step`). A parameter that no rank used keeps its residual.

    Args:
        comm: Communicator used by this object only.
        fraction: Fraction of a bucket's elements that each rank sends, at least one element.
        value_dtype: Dtype in which values are sent. torch.float16: two bytes per value, divided by a power of two near
            the rank's largest absolute value, so that no value overflows. None: the bucket's dtype.
        start_step: Number of steps at the start of training in which all elements are sent.
        topology: Placement of the ranks for `bytes_sent`, which is computed for a ring (see `collective_reducer`).

    Raises:
        UsageError: A value is out of range.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        fraction: float = FRACTION,
        value_dtype: torch.dtype | None = None,
        start_step: int = 20,
        topology: Topology | None = None,
    ) -> None:
        if not 0 < fraction <= 1:
            raise UsageError(f"top-k reduction of a fraction of {fraction}: give more than 0 and at most 1")
        if value_dtype not in (None, torch.float16):
            raise UsageError(f"top-k reduction with values in {value_dtype}: give torch.float16 or None")
        if start_step < 0:
            raise UsageError(f"top-k reduction from step {start_step}: give 0 or more")
        self._comm = comm
        self._fraction = fraction
        self._value_dtype = value_dtype
        self._start_step = start_step
        self._elsewhere = successor_is_elsewhere(comm.rank, num_ranks=comm.num_ranks, topology=topology)
        self._residuals = Residuals(rank=comm.rank, num_ranks=comm.num_ranks)
        self._planned: list[_Planned] = []
        self._steps = 0
        self._began = False  # True once a bucket of this step was reduced
        self._bytes_sent = 0

    @staticmethod
    def needs(buckets: Sequence[Bucket], *, num_ranks: int) -> tuple[int, int]:
        """Returns what a reducer with default options needs: memory for a rank's messages, and bytes sent per step.

        Both are bytes of one rank.
        """
        messages = sum(
            TopKMessage.of(bucket, fraction=FRACTION, value_dtype=None).num_bytes for bucket in buckets
        )
        return messages, messages * (num_ranks - 1)

    @property
    def algorithm(self) -> str:
        return "flat"

    @property
    def wire(self) -> str:
        return "top-k"

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        how = f"top-k, {self._fraction:g} of all in {self._value_dtype}, from step {self._start_step}"
        check_same_plan(self._comm, buckets, how=how)
        check_dtypes(buckets, what="top-k")
        self._planned = []
        for bucket in buckets:
            memory = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
            message = TopKMessage.of(bucket, fraction=self._fraction, value_dtype=self._value_dtype)
            data = torch.zeros(message.num_bytes, dtype=torch.uint8, device=device)
            self._planned.append(_Planned(bucket, memory, message, data))
        self._residuals.plan(buckets, device=device)
        buffers = [planned.memory for planned in self._planned]
        self._will_finish(buckets, buffers)
        return buffers

    def reduce(self, number: int) -> Iterator[bool]:
        planned = self._planned[number]
        self._began = True
        self._residuals.add_to(planned.memory, planned.bucket)
        if self._steps < self._start_step:
            self._sum_as_it_is(planned)
        else:
            self._sum_largest(planned)
        # The collective operations block, and their order must be the same on every rank: do not yield.
        yield from ()

    def _sum_as_it_is(self, planned: _Planned) -> None:
        memory = planned.memory
        self._comm.all_reduce(memory)
        num_bytes = memory.numel() * memory.element_size()
        self._count(all_reduce_bytes(num_bytes, num_ranks=self._comm.num_ranks))
        for slot in planned.bucket.slots:
            self._residuals.left(slot).zero_()
        self._keep_unused(planned)

    def _sum_largest(self, planned: _Planned) -> None:
        memory, bucket = planned.memory, planned.bucket
        self._choose(planned)
        for slot in bucket.slots:
            self._residuals.left(slot).copy_(memory[slot.offset : slot.offset + slot.numel])
        counts = [planned.data.numel()] * self._comm.num_ranks
        gathered = self._comm.all_gather(planned.data, counts=counts)
        self._count(all_gather_bytes(counts, rank=self._comm.rank))
        memory.zero_()
        gradients, flags = memory[: bucket.num_gradients], memory[bucket.first_flag :]
        for data in gathered.split(counts):
            extent, places, values, had = planned.message.parts(data)
            largest = float(extent)
            if not math.isfinite(largest):
                memory.fill_(torch.nan)
                return
            # One rank's indices are distinct, so each element is summed in the order of the ranks.
            gradients.index_add_(0, places.long(), self._decode(values, largest=largest, like=memory))
            flags += had
        self._keep_unused(planned)

    def _choose(self, planned: _Planned) -> None:
        """Writes this rank's message, and subtracts the sent values from the bucket's memory."""
        memory, bucket = planned.memory, planned.bucket
        gradients, flags = memory[: bucket.num_gradients], memory[bucket.first_flag :]
        extent, places, values, had = planned.message.parts(planned.data)
        sizes = gradients.abs()
        largest = float(sizes.max()) if sizes.numel() else 0.0  # NaN if any is
        chosen = sizes.topk(planned.message.count, sorted=False).indices
        picked = gradients[chosen]
        extent.fill_(largest)
        places.copy_(chosen)
        values.copy_(picked / _unit(largest) if self._value_dtype is not None else picked)
        had.copy_(flags != 0)
        gradients[chosen] = picked - self._decode(values, largest=largest, like=memory)

    def _decode(self, values: torch.Tensor, *, largest: float, like: torch.Tensor) -> torch.Tensor:
        unit = _unit(largest) if self._value_dtype is not None else 1.0
        return values.to(like.dtype) * unit

    def _keep_unused(self, planned: _Planned) -> None:
        """Keeps the residuals of parameters that no rank used, since the optimizer skips these parameters."""
        flags = planned.memory[planned.bucket.first_flag :].tolist()
        for slot, flag in zip(planned.bucket.slots, flags, strict=True):
            if flag == 0:
                planned.memory[slot.offset : slot.offset + slot.numel].zero_()
                self._residuals.left(slot).copy_(self._residuals.of(slot))

    def _count(self, num_bytes: int) -> None:
        self._bytes_sent += num_bytes if self._elsewhere else 0

    def end_step(self, *, applied: bool, rescale: float) -> None:
        self._residuals.end_step(applied=applied and self._began, rescale=rescale)
        self._steps += int(self._began)  # no step if only the loss scale changed
        self._began = False

    def bytes_sent(self) -> int:
        return self._bytes_sent

    def state(self) -> list[StateTensor]:
        """Returns the residuals of this rank, and the number of steps, which is the same on every rank."""
        steps = torch.tensor([self._steps], dtype=torch.int64)
        return [
            *self._residuals.state(),
            StateTensor(name=STEPS, tensor=steps, global_shape=(1,), offset=(0,)),
        ]

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return self._residuals.rows_to_load(shapes)

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """See `BucketReducer.load_state`."""
        self._residuals.load_state(tensors, shapes)
        self._steps = int(tensors[STEPS]) if STEPS in tensors else 0

    def close(self) -> None:
        self._planned = []


def _unit(largest: float) -> float:
    """Returns a power of two within a factor of 2 of `largest`, so that scaling is exact.

    Returns 1 if `largest` is not finite.
    """
    if not math.isfinite(largest):
        return 1.0
    # Not below the normal float32 numbers, because values are divided by it.
    return math.ldexp(1.0, max(math.frexp(largest)[1] - 1, -100))
