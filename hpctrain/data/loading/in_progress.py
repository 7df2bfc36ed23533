"""What is being done for each batch that is being made, for the message about a batch that does not come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, final

from hpctrain.data.order.batch_plan import BatchPlan
from hpctrain.data.order.epoch_order import Span


class InputWatch(Protocol):
    """Is shown what a loader waits for and makes, and ends the rank after its limit. `Session.loader` gives one."""

    def during(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """The `with` block waits for what `describe` returns."""

    def making(self, what: str) -> AbstractContextManager[None]:
        """The `with` block makes `what` in this thread, in code that may hold Python's lock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    plan: BatchPlan
    text: str
    thread: int
    reads: bool
    since: float


@final
class InProgress:
    """The stages of the batches that threads are making. Thread-safe.

    where: returns in which process the batch of a thread is transformed; "" in the thread itself. watch: is shown each
    stage in a thread.
    """

    def __init__(self, where: Callable[[int], str], *, watch: InputWatch | None = None) -> None:
        self._where = where
        self._watch = watch
        self._stages: dict[int, _Stage] = {}  # by thread, each of which changes its own entry

    @contextlib.contextmanager
    def stage(self, plan: BatchPlan, text: str, *, reads: bool) -> Iterator[None]:
        """The `with` block does for a batch what `text` says. reads: it reads samples, which threads always do."""
        thread = threading.get_ident()
        self._stages[thread] = _Stage(
            plan=plan, text=text, thread=thread, reads=reads, since=time.monotonic()
        )
        try:
            if self._watch is None or not (reads or self._where(thread) == ""):
                yield
                return
            what = (
                f"samples from {plan.start} of epoch {plan.epoch} on, {text} in thread "
                f"{threading.current_thread().name} ({_describe_indices(plan)})"
            )
            with self._watch.making(what):
                yield
        finally:
            del self._stages[thread]

    def describe(self, *, epoch: int, span: Span) -> str:
        """Returns what is done for the batch at positions `span`; if that has not begun, what is done for others."""
        wanted = f"samples {span.start} to {span.stop - 1} of epoch {epoch}"
        stages = sorted(self._stages.copy().values(), key=lambda stage: stage.since)
        own = [stage for stage in stages if (stage.plan.epoch, stage.plan.start) == (epoch, span.start)]
        if own:
            return f"{wanted}: {self._text(own[0])}"
        return f"{wanted}, which are not begun; {self.describe_all()}"

    def describe_all(self) -> str:
        """Returns what is done for up to four batches."""
        stages = sorted(self._stages.copy().values(), key=lambda stage: stage.since)
        texts = [
            f"samples from {stage.plan.start} of epoch {stage.plan.epoch} on: {self._text(stage)}"
            for stage in stages[:4]
        ]
        return "; ".join(texts) or "no batch is being made"

    def _text(self, stage: _Stage) -> str:
        where = "" if stage.reads else self._where(stage.thread)
        if not where:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            where = f"thread {names.get(stage.thread, stage.thread)}"
        waited_s = time.monotonic() - stage.since
        return f"{stage.text} for {waited_s:.0f} s in {where} ({_describe_indices(stage.plan)})"


def _describe_indices(plan: BatchPlan) -> str:
    indices = plan.indices
    numbers = ", ".join(map(str, indices[:4].tolist())) + (", ..." if len(indices) > 4 else "")
    return f"this rank's {len(indices)} samples have the indices {numbers}"
