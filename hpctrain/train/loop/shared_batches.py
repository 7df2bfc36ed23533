"""The batches of a training with bounded staleness, which fast and slow ranks take from one common order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Protocol, final

from hpctrain.comm import check_same
from hpctrain.data import Batch, Loader, SharedOrder
from hpctrain.errors import UsageError
from hpctrain.reduce import SspUpdater
from hpctrain.train.state.training_state import Position
from hpctrain.train.state.trainings import SessionUpdater


class WaitWatch(Protocol):
    """Interface of a watchdog that ends the rank if reading a batch takes too long."""

    def during(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Returns a context in which the caller waits. `describe` returns in words what the caller waits for."""


@final
class SharedBatches:
    """The parts of the next global batches that this rank takes. Iterate over it once, on every rank.

    The ranks take parts one after another, so that a slow rank takes fewer. Each part of each global batch is taken by
    exactly one rank. For each batch call `backward` of the updater with the batch's weight, and then its `step`. When
    the loop ends, all ranks have made all steps and have the same parameters; do not leave the loop before. A rank that
    only serves gets no batches.

    Attributes:
        position: Where training continues after the loop; before, where it began.
    """

    def __init__(
        self,
        updater: SessionUpdater,
        loader: Loader,
        *,
        position: Position,
        steps: int,
        watch: WaitWatch | None = None,
    ) -> None:
        """Prepares the batches; not collective. See `Session.shared_batches`."""
        if not isinstance(updater, SspUpdater):
            raise UsageError(
                "shared_batches needs an updater of session.distributed_optimizer(..., schedule={'method': 'ssp', "
                f"'staleness': 3}}), not {type(updater).__name__}, whose steps all ranks make together: iterate over "
                "the loader"
            )
        if steps < 0:
            raise UsageError(f"shared_batches(steps={steps}): give a number of steps of 0 or more")
        self._updater = updater
        self._order = SharedOrder(
            loader, epoch=position.epoch, start=position.start, num_parts=updater.num_workers
        )
        self._steps = steps
        self._watch = watch
        self._begun = False
        self.position = position

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's batches. Collective at its begin and its end.

        Raises UsageError on a second iteration, and on every rank if ranks have different positions or steps.
        """
        if self._begun:
            raise UsageError(
                "shared_batches can be iterated over once: call session.shared_batches for the next steps"
            )
        self._begun = True
        updater, first = self._updater, self._updater.clock
        until = first + self._steps
        check_same(
            updater.comm, name="what session.shared_batches was called with",
            value={"position": asdict(self.position), "steps": self._steps, "clock": first}, error=UsageError,
        )  # fmt: skip
        while (part := updater.take(until=until)) is not None:
            with self._reading(part.clock - first):
                batch = self._order.read(part.clock - first, part=part.index)
            if batch.num_samples:
                yield batch
            else:  # the last batch of an epoch may have fewer samples than there are ranks
                updater.skip()
        updater.complete(until)
        after = self._order.after(self._steps)
        self.position = replace(
            self.position, step=self.position.step + self._steps, epoch=after.epoch, start=after.start,
            samples=self.position.samples + after.samples,
        )  # fmt: skip

    def _reading(self, number: int) -> AbstractContextManager[None]:
        if self._watch is None:
            return contextlib.nullcontext()
        epoch, span = self._order.place(number)
        return self._watch.during(
            lambda: f"a part of the samples {span.start} to {span.stop - 1} of epoch {epoch}"
        )
