"""The batches of one epoch for one rank: made ahead by threads, or in lockstep where all ranks read together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hpctrain.data.loading.batch import Batch
from hpctrain.data.loading.prefetch import InStep, Prefetch
from hpctrain.data.order.epoch_order import Order, Span


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlan:
    """The global batches of an epoch that a rank reads. Pure.

    order: maps positions to samples. start: position of the first batch, in samples over all ranks.
    every: n takes each n-th batch only. global_batch: samples over all ranks in one batch.
    num_batches: number of batches.
    """

    order: Order
    start: int
    every: int
    global_batch: int
    num_batches: int

    def span(self, number: int) -> Span:
        """Returns the positions of batch `number`; the last one of an epoch may be shorter than the others."""
        first = self.start + number * self.every * self.global_batch
        return Span(first, min(first + self.global_batch, self.order.num_samples))


class Batches:
    """Iterator over one rank's batches of one epoch. A context manager; `close()` ends its threads."""

    def __init__(
        self,
        source: Prefetch[Batch] | InStep[Batch],
        *,
        num_batches: int,
        waited: Callable[[float], None],
        handed_out: Callable[[Batch], None],
        watched: Callable[[int], AbstractContextManager[None]],
        closed: Callable[[], None],
    ) -> None:
        """Use `Loader.epoch`.

        source: makes the batches. waited: called after each call of `next`, even if it fails, with the seconds that
        it waited. handed_out: called with each batch before `next` returns it. watched: returns the context of a wait
        for the batch of a number. closed: called at the first `close`, once the threads were stopped.
        """
        self._source = source
        self._waited = waited
        self._handed_out = handed_out
        self._watched = watched
        self._closed = closed
        self._is_closed = False
        self._next = 0
        self._counted_wait_s = 0.0
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        return self.num_batches

    def __next__(self) -> Batch:
        try:
            with self._watched(self._next):
                batch = next(self._source)
        finally:
            self._waited(self._source.wait_s - self._counted_wait_s)
            self._counted_wait_s = self._source.wait_s
        self._next += 1
        self._handed_out(batch)
        return batch

    def close(self) -> None:
        """Stops the threads that prepare batches, and waits a moment for them. May be called more than once."""
        self._source.close()
        if not self._is_closed:
            self._is_closed = True
            self._closed()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
