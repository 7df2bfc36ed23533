"""The settings of the training loop and the totals that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import FIRST_AFTER_S, IntervalAdvice, Retention, SaveMode, SaveOptions, WhenBusy
from hpctrain.train.state.training_state import Position


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """When and where a training is saved. A training is always saved at its end, and when it is asked to stop.

    Attributes:
        directory: The folder of the checkpoints.
        every_steps: The number of steps between saves; None: no saves by steps.
        every_minutes: The number of minutes between saves; None: no saves by time.
        by_advice: True to save at the interval that loses the least time. This interval is computed from the measured
            cost of a save and from `failures_per_day`.
        failures_per_day: The expected number of failures of the whole job per day. If given, the interval that loses
            the least time is printed.
        mode: Whether training waits for a save, or the save runs in the background.
        when_busy: What happens if a save is due while another save is in flight.
        options: The options of each save.
    """

    directory: Path
    every_steps: int | None = None
    every_minutes: float | None = None
    by_advice: bool = False
    failures_per_day: float | None = None
    mode: SaveMode = SaveMode.SYNC
    when_busy: WhenBusy = WhenBusy.WAIT
    options: SaveOptions = field(default_factory=SaveOptions)

    def due_by_step(self, step: int) -> bool:
        """Returns True if `step` is a multiple of `every_steps`."""
        return self.every_steps is not None and step % self.every_steps == 0

    def due_by_time(self, seconds_since_last: float, *, advice: IntervalAdvice | None = None) -> bool:
        """Returns True if a save is due by time.

        advice: the interval computed from the cost of the saves so far; None if no save was measured yet.
        """
        due = self.every_minutes is not None and seconds_since_last >= 60 * self.every_minutes
        if self.by_advice:
            due |= seconds_since_last >= (advice.interval_s if advice is not None else FIRST_AFTER_S)
        return due

    @property
    def keeps_best(self) -> bool:
        return isinstance(self.options.keep, Retention) and self.options.keep.best is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """The settings of the training loop."""

    total_steps: int
    checkpoint: CheckpointPolicy
    metrics_every_steps: int
    evaluate_every_steps: int | None
    sample_sums: bool = False  # whether hashes of each step's samples are recorded
    evaluation_samples: int | None = None  # None: all of them
    progress_every_s: float
    on_terminal: bool = False  # the user sees rank 0's output on a terminal


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What the training loop of this process has done, as seen by this rank.

    A loop begins at step 0, or at the checkpoint from which the run resumed.
    """

    position: Position
    last_loss: float
    quality: dict[str, float]
    seconds: dict[str, float]
    steps: int  # done by this loop; `position.step` counts from the start of the run
    samples: int  # over all ranks, by this loop
    skipped_steps: int
    skipped_samples: int  # damaged ones, over all ranks, by this loop
    checkpoints: int
    resumed_from: str | None
    micro_batches: int = 1  # in use at the end
    out_of_memory: int = 0  # how often a rank ran out of memory in this loop
    roll_backs: int = 0  # of the whole run
    lr_factor: float = 1.0  # factor of the learning rate after the roll-backs
    stopped_by: str | None = None  # why it stopped before its last step
    time_left_s: float | None = (
        None  # until its end when it stopped; None if it did not, or no limit is known
    )
    slow: Sequence[Mapping[str, Any]] = ()  # ranks and links that were slow; on rank 0
    energy_j: Mapping[str, float] | None = None  # of this node, by source; None: not read by this rank
    efficiency: Mapping[str, Any] | None = None  # of all ranks, as in the records `efficiency`
