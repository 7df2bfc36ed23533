"""The newest records of a run, as they are read. Pure, and bounded whatever the length of the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from hpctrain.report import INCIDENTS
from hpctrain.telemetry import STEP

Record = Mapping[str, Any]

# Times and rates are of so many last recorded steps.
WINDOW_STEPS = 200
_LOSSES = 4096
_INCIDENTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of one rank. time: of the record, s since 1970. loss: NaN if it was not finite. samples: of all steps so
    far, on all ranks. own_s: without standing still for communication or for other stages of a pipeline."""

    step: int
    time: float
    epoch: int
    loss: float
    samples: int
    seconds: Mapping[str, float]

    @property
    def own_s(self) -> float:
        return self.seconds["step"] - self.seconds["exposed_sync"] - self.seconds.get("bubble", 0.0)

    @classmethod
    def of(cls, record: Record) -> RecordedStep:
        loss = record["loss"]
        return cls(
            step=record["step"], time=record["time"], epoch=record["epoch"],
            loss=loss if isinstance(loss, float | int) else math.nan, samples=record["global_samples"],
            seconds=record["seconds"],
        )  # fmt: skip


@final
class RunHistory:
    """What the view is made of. A step that was done again, after a roll-back or a resume, counts once, the later time.

    start: the newest line of starts.jsonl. steps: by rank, the last WINDOW_STEPS of this start. losses: of rank 0,
    also of earlier starts: step and loss. incidents: oldest first. efficiency, evaluation: the newest records of these
    kinds.
    """

    def __init__(self) -> None:
        self.start: Record | None = None
        self.steps: dict[int, deque[RecordedStep]] = {}
        self.losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self.incidents: deque[Record] = deque(maxlen=_INCIDENTS)
        self.efficiency: Record | None = None
        self.evaluation: Record | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.start["environment"]["ranks"]) if self.start is not None else 0

    @property
    def started_at(self) -> float:
        return float(self.start["time"]) if self.start is not None else 0.0

    def begin(self, start: Record) -> None:
        """Training has begun or was resumed; `start` is the line of starts.jsonl that says so."""
        self.start = start
        self.steps = {}
        self.efficiency = None

    def add(self, rank: int, records: Iterable[Record]) -> None:
        """Adds what a rank has recorded, in its order."""
        for record in records:
            kind = record.get("kind")
            if kind == STEP:
                self._add_step(rank, RecordedStep.of(record))
            elif kind in INCIDENTS and (rank == 0 or kind == "damage"):
                self.incidents.append(record)
            elif kind == "efficiency" and rank == 0 and record["time"] >= self.started_at:
                self.efficiency = record
            elif kind == "evaluation" and rank == 0:
                self.evaluation = record

    def _add_step(self, rank: int, found: RecordedStep) -> None:
        if rank == 0:
            while self.losses and self.losses[-1][0] >= found.step:
                self.losses.pop()
            self.losses.append((found.step, found.loss))
            if found.time < self.started_at:  # both are of rank 0's clock
                return
        steps = self.steps.setdefault(rank, deque(maxlen=WINDOW_STEPS))
        while steps and steps[-1].step >= found.step:
            steps.pop()
        steps.append(found)
