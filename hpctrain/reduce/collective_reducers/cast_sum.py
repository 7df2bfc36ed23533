"""The backend's own sum of a bucket, after a cast to the wire's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket


class StartSum(Protocol):
    """Signature of `Collective.start_all_reduce`."""

    def __call__(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]: ...


WIRE_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype(wire: str, *, bucket: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a bucket of dtype `bucket` is sent. `fp32` sends every bucket in its own dtype."""
    return WIRE_DTYPES[wire] or bucket


@final
class CastSum:
    """Casts a bucket to the wire's dtype and has it summed in place, on the bucket's device.

    start: starts to sum a buffer over all ranks and returns a function that waits; collective. bytes_of(numel,
    itemsize): bytes that this rank sends to other nodes. wire: `fp32`, `fp16` or `bf16`; the constructor raises
    UsageError if the backend cannot sum it.
    """

    def __init__(
        self,
        start: StartSum,
        *,
        wire: str,
        backend: str,
        bytes_of: Callable[[int, int], int],
    ) -> None:
        if wire not in WIRE_DTYPES:
            raise UsageError(
                f"a backend's own sum does not support the wire format {wire!r}: choose {', '.join(WIRE_DTYPES)}, "
                "or the algorithm direct"
            )
        if wire == "bf16" and backend == "horovod":
            raise UsageError("Horovod cannot sum bfloat16: choose the algorithm direct, which sends bytes")
        self._start = start
        self._wire = wire
        self._bytes_of = bytes_of
        self._cast: list[torch.Tensor | None] = []
        self.bytes_sent = 0

    @property
    def wire(self) -> str:
        return self._wire

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        self._cast = []
        for bucket in buckets:
            dtype = wire_dtype(self._wire, bucket=bucket.dtype)
            own = dtype == bucket.dtype
            self._cast.append(None if own else torch.zeros(bucket.numel, dtype=dtype, device=device))

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]:
        """See `BucketSum.start`."""
        cast = self._cast[number]
        travelling = memory if cast is None else cast.copy_(memory)
        wait = self._start(travelling, number=number)
        self.bytes_sent += self._bytes_of(travelling.numel(), travelling.element_size())

        def finish() -> None:
            wait()
            if cast is not None:
                memory.copy_(cast)

        return finish
