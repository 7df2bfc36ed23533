"""What a stretch of training amounts to."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.train.state import Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a finished stretch of training amounts to, as this rank saw it."""

    position: Position
    last_loss: float
    quality: dict[str, float]
    seconds: dict[str, float]
    steps: int  # done in this stretch; `position.step` counts from the beginning of the run
    samples: int  # over all ranks, in this stretch
    skipped_steps: int
    skipped_samples: int  # damaged ones, over all ranks, in this stretch
    checkpoints: int
    resumed_from: str | None
