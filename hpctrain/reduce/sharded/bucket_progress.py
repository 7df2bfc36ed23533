"""Which gradients of a step are ready, and which bucket is reduced next. Does not communicate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from hpctrain.reduce.data_parallel.pending_gradient import ran_twice


@final
class BucketProgress:
    """Of one step at a time. buckets: the numbers of the parameters of each.

    order: in which the buckets are reduced, the same on every rank; at first that of `buckets`.
    """

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._indices = buckets
        self._bucket_of = {index: number for number, of in enumerate(self._indices) for index in of}
        self.order = list(range(len(buckets)))
        self.begin_step()

    def begin_step(self) -> None:
        self._ready: set[int] = set()
        self._waiting_for = list(map(len, self._indices))
        self._completed: list[int] = []
        self._num_taken = 0

    def indices(self, bucket: int) -> Sequence[int]:
        """Returns the numbers of the bucket's parameters."""
        return self._indices[bucket]

    @property
    def has_begun(self) -> bool:
        """True if a gradient of this step is ready."""
        return bool(self._ready)

    def is_ready(self, index: int) -> bool:
        """Returns True if the gradient of this step is ready."""
        return index in self._ready

    @property
    def ready(self) -> Iterable[int]:
        """The parameters whose gradient of this step is ready."""
        return self._ready

    @property
    def completed(self) -> Sequence[int]:
        """The buckets that backward has completed, in this order."""
        return self._completed

    def gradient_is_ready(self, index: int) -> bool:
        """Notes it. Returns True if its bucket is complete. Raises UsageError for the second time in a step."""
        if index in self._ready:
            raise ran_twice()
        self._ready.add(index)
        bucket = self._bucket_of[index]
        self._waiting_for[bucket] -= 1
        if self._waiting_for[bucket] == 0:
            self._completed.append(bucket)
        return self._waiting_for[bucket] == 0

    def end_backward(self) -> None:
        """No more gradients are coming: of unused parameters, or of all on ranks without samples."""
        self._ready = set(self._bucket_of)
        self._waiting_for = [0] * len(self._waiting_for)

    def take_complete(self) -> Iterator[int]:
        """Yields the next complete buckets, in the order, up to one that is not."""
        while self._num_taken < len(self.order) and self._waiting_for[self.order[self._num_taken]] == 0:
            yield self.order[self._num_taken]
            self._num_taken += 1  # not if taking it has failed

    def completed_order(self) -> list[int]:
        """Returns the order in which buckets were completed, those that were not at the end."""
        known = set(self._completed)
        return [*self._completed, *(bucket for bucket in self.order if bucket not in known)]
