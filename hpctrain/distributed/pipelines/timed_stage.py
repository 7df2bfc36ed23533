"""PyTorch's pipeline stage, which notes when it computes; what lies between is the bubble."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def gaps(busy: Sequence[tuple[float, float]], *, begin: float, end: float) -> list[tuple[float, float]]:
    """Returns the times between `begin` and `end` that are in none of `busy`, in order: begin and end of each."""
    found, at = [], begin
    for busy_begin, busy_end in sorted(busy):
        if busy_begin > at:
            found.append((at, busy_begin))
        at = max(at, busy_end)
    return [*found, (at, end)] if end > at else found


@contextmanager
def timed(busy: list[tuple[float, float]]) -> Iterator[None]:
    """Adds begin and end of the `with` block, by `time.perf_counter`, to `busy`."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        busy.append((begin, time.perf_counter()))


def timed_stage(*arguments: Any, busy: list[tuple[float, float]], **options: Any) -> Any:
    """Returns PyTorch's `PipelineStage(*arguments, **options)`, which adds to `busy` when it computes.

    Sums of sharded gradients, which PyTorch makes after the last backward of a stage, count as computing. Loads torch's
    pipelining.
    """
    from torch.distributed.pipelining import PipelineStage

    class TimedStage(PipelineStage):
        def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().forward_one_chunk(*arguments, **options)

        def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().backward_one_chunk(*arguments, **options)

        def backward_weight_one_chunk(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().backward_weight_one_chunk(*arguments, **options)

        def perform_reduce_grad(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().perform_reduce_grad(*arguments, **options)

    return TimedStage(*arguments, **options)
