"""Counts the steps of a schedule, and says what each step exchanges. Pure.

A step is one of three kinds. In a local step a worker exchanges nothing with other workers. In a step with a vote the
ranks sum a few numbers: the loss, requests to stop or to save. In a step that ends a round they also take over an
average of the parameters.

The times of votes follow from measured times, so that a request to stop is answered within seconds, without a message
in each of many short steps. Votes do not change what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, final

# A request to stop or to save is answered after about this time, or after one step if a step takes longer.
VOTE_EVERY_S = 2.0


class StepKind(Enum):
    """What a step exchanges between workers."""

    LOCAL = "nothing"
    VOTE = "numbers"
    ENDS_ROUND = "numbers and an average"


@final
class Rounds:
    """The position of a run in its rounds; the same on every rank.

    Attributes:
        step: The number of steps done, including synchronous steps before the first round.
        done: The number of steps since the newest average was started.
        waits: The number of steps until the average in flight is taken over; None: no average is in flight.
    """

    def __init__(self, *, every: int, wait: int, from_step: int) -> None:
        """Begins at step 0.

        Args:
            every: The number of steps between the starts of two averages.
            wait: The number of steps from the start of an average to the step that takes it over.
            from_step: The number of synchronous steps at the start.
        """
        self._every = every
        self._wait = wait
        self._from_step = from_step
        self.step = 0
        self.done = 0
        self.waits: int | None = None
        self._until_vote = 0

    @property
    def is_synchronous(self) -> bool:
        """True while the synchronous steps at the start are not all done."""
        return self.step < self._from_step

    @property
    def kind(self) -> StepKind:
        """What the next step exchanges."""
        if self._takes_over_next:
            return StepKind.ENDS_ROUND
        return StepKind.VOTE if self._until_vote == 0 else StepKind.LOCAL

    @property
    def _takes_over_next(self) -> bool:
        if self.waits is not None:
            return self.waits == 1
        return self._wait == 0 and self.starts_next

    @property
    def starts_next(self) -> bool:
        """True if an average starts after the update of the next step."""
        return self.done + 1 >= self._every and not self.is_synchronous

    @property
    def has_begun(self) -> bool:
        """True if workers may differ: steps were done since the newest average, or one is in flight."""
        return self.done > 0 or self.waits is not None

    def after_step(self) -> None:
        """Counts a step. A step that all ranks have dropped together is not counted."""
        if self.is_synchronous:
            self.step += 1
            return
        starts = self.starts_next
        if self.waits is not None:
            self.waits -= 1
            if self.waits == 0:
                self.waits = None
        self.step += 1
        self.done += 1
        self._until_vote = max(0, self._until_vote - 1)
        if starts:
            self.done = 0
            self.waits = self._wait or None

    def voted(self, *, step_s: float) -> None:
        """Sets the number of local steps until the next vote.

        step_s: the mean duration of a step over the ranks, in seconds; the same on every rank.
        """
        self._until_vote = max(0, int(VOTE_EVERY_S / step_s) - 1) if step_s > 0 else 0

    def end(self) -> None:
        """Ends the round early: all workers hold the same parameters now, and the next step votes."""
        self.done, self.waits, self._until_vote = 0, None, 0

    def state(self) -> dict[str, Any]:
        """Returns the position for a checkpoint, as values for JSON."""
        return {"step": self.step, "done": self.done, "waits": self.waits}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continues from `state` of a run, which may have had another schedule. The next step votes."""
        self.step = int(saved["step"])
        self.done = int(saved["done"])
        waits = saved["waits"]
        self.waits = None if waits is None else int(waits)
        self._until_vote = 0
