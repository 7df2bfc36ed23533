"""Reducer for one rank, whose gradients are the sum already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.contract.step_end import StepEnd


@final
class LocalReducer(StepEnd):
    """`BucketReducer` that does nothing; no value is rounded.

    wire: the requested wire format, from which the updater derives the same defaults as with several ranks.
    """

    def __init__(self, *, wire: str = "fp32") -> None:
        self._wire = wire

    @property
    def algorithm(self) -> str:
        return "flat"

    @property
    def wire(self) -> str:
        return self._wire

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        memory = [torch.zeros(bucket.numel, dtype=bucket.dtype, device=device) for bucket in buckets]
        self._will_finish(buckets, memory)
        return memory

    def reduce(self, number: int) -> Iterator[bool]:
        return iter(())

    def settle(self, *, applied: bool, rescale: float) -> None: ...

    def bytes_sent(self) -> int:
        return 0

    def state(self) -> list[StateTensor]:
        return []

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return {}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None: ...

    def close(self) -> None: ...
