"""What is being done for each batch that is being made, for the message about a batch that does not come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias, final

from hpctrain.data.order.batch_plan import BatchPlan
from hpctrain.data.order.epoch_order import Span

InputWatch: TypeAlias = Callable[[Callable[[], str]], AbstractContextManager[None]]
"""Called with a function that says what is waited for; its `with` block is the wait. `Session.loader` gives one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    plan: BatchPlan
    text: str
    thread: int
    since: float


@final
class InProgress:
    """The stages of the batches that threads are making. Thread-safe.

    where: returns in which process the batch of a thread is transformed; "" in the thread itself.
    """

    def __init__(self, where: Callable[[int], str]) -> None:
        self._where = where
        self._stages: dict[int, _Stage] = {}  # by thread, each of which changes its own entry

    @contextlib.contextmanager
    def stage(self, plan: BatchPlan, text: str) -> Iterator[None]:
        """The `with` block does for a batch what `text` says."""
        thread = threading.get_ident()
        self._stages[thread] = _Stage(plan=plan, text=text, thread=thread, since=time.monotonic())
        try:
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
        where = self._where(stage.thread)
        if not where:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            where = f"thread {names.get(stage.thread, stage.thread)}"
        indices = stage.plan.indices
        numbers = ", ".join(str(index) for index in indices[:4]) + (", ..." if len(indices) > 4 else "")
        return (
            f"{stage.text} for {time.monotonic() - stage.since:.0f} s in {where} (this rank's {len(indices)} samples "
            f"have the indices {numbers})"
        )
