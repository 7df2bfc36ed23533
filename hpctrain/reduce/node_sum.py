"""This rank's part of a bucket, summed over the ranks of its node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from hpctrain.reduce.add import add
from hpctrain.reduce.spans import Span


@final
class NodeSum:
    """The sum of `part` of the buckets of all the node's ranks, into each of them, where nothing leaves the node.

    buckets: by local rank, each of shape (numel,), in host memory. num_gradients: of a bucket's elements those that
    count in the norm, the first ones.
    """

    def __init__(self, buckets: Sequence[torch.Tensor], *, part: Span, num_gradients: int) -> None:
        self._parts = tuple(bucket[part.begin : part.end].numpy() for bucket in buckets)
        self._into = self._parts if len(buckets) > 1 else ()
        self._num_squared = max(0, num_gradients - part.begin)
        self._square = 0.0

    def sum(self) -> None:
        """In the order of the ranks. The buckets must be full, and nobody else write to this part."""
        self._square = add(self._parts, into=self._into, num_squared=self._num_squared)

    def square(self) -> float:
        """Sum of the squares of the gradients that were summed last."""
        return self._square


def sum_into(values: torch.Tensor, buckets: Sequence[torch.Tensor]) -> None:
    """values = the sum of at least two buckets' parts, in the order of the ranks."""
    add([bucket.numpy() for bucket in buckets], into=[values.numpy()])
