"""Records when buckets become complete during backward, from which scaling to more nodes is predicted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.updater import BackwardTimes


@final
class BackwardClock:
    """Context manager around the last backward of a step."""

    def __init__(self) -> None:
        self.reset()

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._ended = time.perf_counter()

    def filled(self) -> None:
        """The next bucket is complete."""
        self._filled.append(time.perf_counter())

    def reset(self) -> None:
        self._began = self._ended = 0.0
        self._filled: list[float] = []

    def times(self, buckets: Sequence[Bucket], *, update_s: float) -> BackwardTimes | None:
        """Returns the times of the step; None if backward ran elsewhere or left a bucket incomplete."""
        if not self._began < self._ended or not self._filled or self._filled[-1] > self._ended:
            return None
        return BackwardTimes(
            backward_s=self._ended - self._began,
            update_s=update_s,
            ready_s=tuple(filled - self._began for filled in self._filled),
            bucket_bytes=tuple(bucket.numel * bucket.dtype.itemsize for bucket in buckets),
        )
