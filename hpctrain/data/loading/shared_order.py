"""Parts of global batches for readers that take them from one common order, whoever comes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hpctrain.data.integrity.read_checker import OnDamage
from hpctrain.data.loading.batch import Batch
from hpctrain.data.loading.loader import Loader, ReadFlags
from hpctrain.data.order.epoch_order import Order, PositionRange, plan_batch
from hpctrain.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPosition:
    """A position in the common order.

    Attributes:
        epoch: The epoch, from 0.
        start: Number of samples of this epoch that were used.
        samples: Number of samples that were used since the order began.
    """

    epoch: int
    start: int
    samples: int


@final
class SharedOrder:
    """The global batches of a loader from one position on, over the ends of epochs, each divided into equal parts.

    Part i of a batch has the samples that rank i of `num_parts` ranks would have, with the same weight. Not collective.

    Args:
        loader: The loader, whose dataset, order, batch size, transform and memory are used.
        epoch: Epoch of the first batch.
        start: Position of the first batch in that epoch, in samples.
        num_parts: Number of parts of each global batch.

    Raises:
        UsageError: The loader reads collectively, or leaves damaged samples out, for which ranks must agree on each
            batch; or a global batch has fewer samples than parts.
    """

    def __init__(self, loader: Loader, *, epoch: int, start: int, num_parts: int) -> None:
        if ReadFlags.of(loader.dataset).collective:
            raise UsageError(
                "the dataset is read by all ranks together, but parts of a common order are read by one rank alone: "
                "open it without io = 'collective'"
            )
        if loader.on_damage is OnDamage.SKIP:
            raise UsageError(
                "on_damage is 'skip', for which the ranks agree on each batch, but parts of a common order are read by "
                "one rank alone: use on_damage = 'stop'"
            )
        if loader.global_batch < num_parts:
            raise UsageError(
                f"a global batch of {loader.global_batch} samples cannot be split over {num_parts} ranks that train: "
                f"make it at least {num_parts}"
            )
        self._loader = loader
        self._epoch = epoch
        self._start = start
        self._num_parts = num_parts
        self._in_first = loader.remaining_batches(start=start)
        self._order: Order | None = None

    def place(self, number: int) -> tuple[int, PositionRange]:
        """Returns the epoch and the positions of the global batch of index `number`, counted from the first one."""
        loader = self._loader
        epoch, start = self._epoch, self._start + number * loader.global_batch
        if number >= self._in_first:
            epochs, index = divmod(number - self._in_first, loader.batches_per_epoch)
            epoch, start = self._epoch + 1 + epochs, index * loader.global_batch
        return epoch, PositionRange(start, min(start + loader.global_batch, loader.num_positions))

    def read(self, number: int, *, part: int) -> Batch:
        """Reads one part of the global batch of index `number`, on the calling thread."""
        epoch, span = self.place(number)
        loader = self._loader
        if self._order is None or self._order.epoch != epoch:
            self._order = loader.order.for_epoch(
                epoch, num_samples=loader.dataset.num_samples, seed=loader.seed
            )
        plan = plan_batch(
            self._order, span=span, global_batch=loader.global_batch, last_batch=loader.last_batch, rank=part,
            num_ranks=self._num_parts,
        )  # fmt: skip
        return loader.read(plan)

    def after(self, num_batches: int) -> OrderPosition:
        """Returns the position after the first `num_batches` global batches."""
        if num_batches == 0:
            return OrderPosition(epoch=self._epoch, start=self._start, samples=0)
        epoch, span = self.place(num_batches - 1)
        samples = span.stop - (self._start if epoch == self._epoch else 0)
        if epoch > self._epoch:
            _, of_epoch = self.place(self._in_first + self._loader.batches_per_epoch - 1)
            _, of_first = (
                self.place(self._in_first - 1) if self._in_first else (0, PositionRange(0, self._start))
            )
            samples += of_first.stop - self._start + (epoch - self._epoch - 1) * of_epoch.stop
        return OrderPosition(epoch=epoch, start=span.stop, samples=samples)
