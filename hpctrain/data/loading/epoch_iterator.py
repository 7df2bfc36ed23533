"""One rank's way through an epoch: batches made ahead, or in step where all ranks read together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.data.loading.batch import Batch
from hpctrain.data.loading.block_readahead import read_ahead_for
from hpctrain.data.loading.lockstep import InStep
from hpctrain.data.loading.prefetch import Prefetch
from hpctrain.data.order.cached_order import ahead_for
from hpctrain.data.order.epoch_order import Order, Span

if TYPE_CHECKING:  # it makes these
    from hpctrain.data.loading.loader import Loader

MAX_BATCHES_AHEAD = 1024  # what a batch costs beside its tensors is not counted in bytes


class Batches:
    """Iterator over one rank's batches of one epoch. A context manager; `close()` ends its threads."""

    def __init__(self, loader: Loader, *, order: Order, start: int, every: int = 1) -> None:
        self._loader = loader
        self._counted_wait_s = 0.0
        self.num_batches = -(-loader.remaining_batches(start=start) // every)
        read_ahead = read_ahead_for(loader.dataset, order, start=start)
        order = ahead_for(order, num_ranks=loader.num_ranks)

        def make(number: int) -> Batch:
            first = start + number * every * loader.global_batch
            span = Span(first, min(first + loader.global_batch, order.num_samples))
            if read_ahead is not None:
                read_ahead.before(span)
            return loader.load(order, span=span)

        self._prefetch: Prefetch[Batch] | InStep[Batch]
        if getattr(loader.dataset, "collective", False):
            # All ranks read together: none may be ahead of the others, or left alone with a batch to read.
            self._prefetch = InStep(make, num_items=self.num_batches)
        else:
            self._prefetch = Prefetch(
                make, num_items=self.num_batches, depth=MAX_BATCHES_AHEAD, bound=loader.prefetch_bound(),
                num_threads=loader.num_threads, help_make=loader.may_help,
            )  # fmt: skip

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        return self.num_batches

    def __next__(self) -> Batch:
        try:
            batch = next(self._prefetch)
        finally:
            self._loader.wait_s += self._prefetch.wait_s - self._counted_wait_s
            self._counted_wait_s = self._prefetch.wait_s
        self._loader.position = batch.stop
        return batch

    def close(self) -> None:
        """End the threads that prepare batches. May be called again."""
        self._prefetch.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
