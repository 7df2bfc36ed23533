"""One rank: its gradients are the sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import StateTensor


@final
class LocalReducer:
    """`BucketReducer` with nothing to sum and nothing to send, so nothing is rounded.

    wire: what other ranks would be sent; the same defaults then follow from it on any number of ranks.
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
        return [torch.zeros(bucket.numel, dtype=bucket.dtype, device=device) for bucket in buckets]

    def reduce(self, number: int) -> Iterator[bool]:
        return iter(())

    def settle(self, *, applied: bool, rescale: float) -> None: ...

    def bytes_sent(self) -> int:
        return 0

    def state(self) -> list[StateTensor]:
        return []

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def close(self) -> None: ...
