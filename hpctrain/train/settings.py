"""What the training loop is told, apart from the objects it works on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """When and where state is saved. Beside this it is saved at the end and when the run is asked to stop."""

    directory: Path
    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 3
    engine: str = "auto"

    def due_by_step(self, step: int) -> bool:
        """True after every `every_steps`-th step."""
        return self.every_steps is not None and step % self.every_steps == 0

    def due_by_time(self, seconds_since_last: float) -> bool:
        return self.every_minutes is not None and seconds_since_last >= 60 * self.every_minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """The loop's numbers."""

    total_steps: int
    micro_batches: int
    checkpoint: CheckpointPolicy
    metrics_every_steps: int
    evaluate_every_steps: int | None
    evaluation_samples: int | None = None  # None: all of them
    progress_every_s: float
    on_terminal: bool = False  # rank 0's output is a terminal that a person looks at
