"""Saves and evaluations that wait for the end of a round of a schedule. Pure.

Within a round, workers hold different parameters. What is due is therefore done when the round ends. Without a
schedule every step ends a round, so that nothing waits.
"""

from __future__ import annotations

from typing import final

from hpctrain.reduce import StepOutcome
from hpctrain.train.loop.settings import LoopSettings


@final
class WaitingForRound:
    """Remembers that a save or an evaluation is due. The same on every rank."""

    def __init__(self) -> None:
        self._save = False
        self._evaluation = False

    def evaluates_after(self, step: int, settings: LoopSettings) -> bool:
        """Returns True if an evaluation is due after `step`, or waits for the end of a round."""
        every = settings.evaluate_every_steps
        due = every is not None and step % every == 0
        return (due or self._evaluation) and step < settings.total_steps

    def evaluates_now(self, due: bool, outcome: StepOutcome) -> bool:
        """Returns True if an evaluation that is due can be made after the step with this outcome."""
        self._evaluation = due and not outcome.round_ended
        return due and outcome.round_ended

    def saves_now(self, due: bool, outcome: StepOutcome) -> bool:
        """Returns True if the state is to be saved after the step with this outcome."""
        due = due or self._save
        self._save = due and not outcome.round_ended
        return due and outcome.round_ended
