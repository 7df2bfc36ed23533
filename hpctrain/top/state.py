"""Computes what the view shows from the records and files of a run. Pure functions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, final

import numpy as np

from hpctrain.report import INCIDENTS, incident_text
from hpctrain.scaling import divided
from hpctrain.supervise import Attempt
from hpctrain.telemetry import PART_KEYS, PART_NAMES, STEP, in_words

# The newest records of a run, as they are read. Pure, and bounded whatever the length of the run.


Record = Mapping[str, Any]

# The number of last recorded steps from which times and rates are computed.
WINDOW_STEPS = 200
_LOSSES = 4096
_INCIDENTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of one rank.

    Attributes:
        time: The time of the step's record, in seconds since 1970.
        loss: The loss; NaN if it was not finite.
        samples: The number of samples of all steps so far, on all ranks.
        own_s: The seconds of the step without waits for communication or for other pipeline stages.
    """

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
    """The records from which the view is computed.

    Of a step that was repeated after a roll-back or resume, only the later record is kept.

    Attributes:
        start: The newest line of starts.jsonl; None before the first line.
        steps: For each rank, its last WINDOW_STEPS steps of the newest start.
        losses: Pairs (step, loss) of rank 0, including pairs of earlier starts.
        incidents: The newest incidents, oldest first.
        efficiency: The newest record `efficiency` of the newest start; None before the first record.
        evaluation: The newest record `evaluation`; None before the first record.
        advice: The newest record `scaling` of the newest start; None before the first record.
    """

    def __init__(self) -> None:
        self.start: Record | None = None
        self.steps: dict[int, deque[RecordedStep]] = {}
        self.losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self.incidents: deque[Record] = deque(maxlen=_INCIDENTS)
        self.efficiency: Record | None = None
        self.evaluation: Record | None = None
        self.advice: Record | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.start["environment"]["ranks"]) if self.start is not None else 0

    @property
    def started_at(self) -> float:
        return float(self.start["time"]) if self.start is not None else 0.0

    def begin(self, start: Record) -> None:
        """Clears steps, efficiency and advice when training starts or is resumed.

        start: the new line of starts.jsonl.
        """
        self.start = start
        self.steps = {}
        self.efficiency = None
        self.advice = None

    def add(self, rank: int, records: Iterable[Record]) -> None:
        """Adds records of a rank, in the order in which they were written."""
        for record in records:
            kind = record.get("kind")
            if kind == STEP:
                self._add_step(rank, RecordedStep.of(record))
            elif kind in INCIDENTS and (rank == 0 or kind == "damage"):
                self.incidents.append(record)
            elif kind == "efficiency" and rank == 0 and record["time"] >= self.started_at:
                self.efficiency = record
            elif kind == "scaling" and rank == 0 and record["time"] >= self.started_at:
                self.advice = record
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


# What the view shows, from the records and files of a run.


# A run whose newest record is older than this, and than three times the longest gap before, is not called running.
SILENT_AFTER_S = 10.0
_SLOWEST = 3
_LEAST_STEPS = 5

Kind = Literal["good", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The small files of a run directory; None for a file that does not exist.

    summary, ending (`watch/ending.json`) and slow are also None if an earlier start wrote the file. checkpoint: step of
    the newest finished checkpoint, and the time at which it was written, in seconds since 1970.
    """

    summary: Record | None = None
    ending: Record | None = None
    slow: Record | None = None
    limits: Record | None = None
    micro_batch: Record | None = None
    attempts: Sequence[Attempt] = ()
    checkpoint: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The time that a rank takes for a step.

    own_s: seconds per step without waits for communication or for other pipeline stages, as the mean over the steps.
    factor: `own_s` divided by the median of `own_s` over the ranks.
    """

    rank: int
    node: str
    own_s: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run at one moment, as the view shows it. Times are in seconds; None for unknown values.

    Attributes:
        status: The status as text.
        kind: Whether the status is good, a note or a problem.
        age_s: The age of the newest record of a step.
        left_s: The time until the run's time limit.
        to_go_s: The estimated time until the last step of the run is done.
        step_s: The p50, p95 and p99 of the step time on rank 0.
        num_steps: The number of steps from which `step_s` is computed.
        parts: The shares of a step's parts, by the names in `PART_NAMES`.
        parts_of: A text that says from which steps and ranks `parts` is computed.
        num_followed: The number of ranks whose records are read.
        slowest: The slowest of the followed ranks, the slowest first.
        advice: What the run says of more or fewer nodes; "" before it says something.
    """

    name: str
    directory: str
    status: str
    kind: Kind
    num_ranks: int
    num_nodes: int
    step: int | None
    total_steps: int | None
    epoch: int | None
    age_s: float | None
    to_go_s: float | None
    left_s: float | None
    loss: float | None
    losses: Sequence[float]
    samples_per_s: float | None
    step_s: tuple[float, float, float] | None
    num_steps: int
    parts: Mapping[str, float]
    parts_of: str
    num_followed: int
    slowest: Sequence[RankTime]
    advice: str
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    quality: str
    notes: Sequence[str]
    incidents: Sequence[tuple[float, str]]
    attempts: Sequence[str]


def state_of(history: RunHistory, files: RunFiles, *, directory: str, now: float) -> RunState:
    """Returns the state of the run at the time `now`, in seconds since 1970."""
    start = history.start or {}
    environment: Mapping[str, Any] = start.get("environment", {})
    steps = list(history.steps.get(0, ()))
    newest = steps[-1] if steps else None
    rates = _rates(steps)
    total = start.get("total_steps")
    step = newest.step if newest is not None else start.get("step")
    over = files.summary is not None
    status, kind = _status(history, files, steps, now=now)
    parts, parts_of = _parts(history, steps)
    to_go_s = None
    if rates is not None and total is not None and step is not None and not over:
        to_go_s = (total - step) / rates[0]
    return RunState(
        name=str(start.get("recipe", {}).get("run", {}).get("name", "")),
        directory=directory,
        status=status,
        kind=kind,
        num_ranks=history.num_ranks,
        num_nodes=len(environment.get("node_names", ())),
        step=step,
        total_steps=total,
        epoch=newest.epoch if newest is not None else None,
        age_s=None if newest is None else max(0.0, now - newest.time),
        to_go_s=to_go_s,
        left_s=None if over else _left_s(start, files.attempts, now=now),
        loss=history.losses[-1][1] if history.losses else None,
        losses=[loss for _, loss in history.losses],
        samples_per_s=None if rates is None else rates[1],
        step_s=_quantiles(steps),
        num_steps=len(steps),
        parts=parts,
        parts_of=parts_of,
        num_followed=len(history.steps),
        slowest=_slowest(history, environment),
        advice="" if history.advice is None or over else str(history.advice["text"]),
        checkpoint_step=None if files.checkpoint is None else files.checkpoint[0],
        checkpoint_age_s=None if files.checkpoint is None else max(0.0, now - files.checkpoint[1]),
        quality=_quality(history.evaluation),
        notes=_notes(files),
        incidents=[(float(record["time"]), incident_text(record)) for record in history.incidents],
        attempts=_attempts(files.attempts),
    )


def _status(
    history: RunHistory, files: RunFiles, steps: Sequence[RecordedStep], *, now: float
) -> tuple[str, Kind]:
    if files.summary is not None:
        status = str(files.summary.get("status"))
        return status, "good" if status == "finished" else "note" if status == "stopped" else "problem"
    if files.ending is not None:
        ending = files.ending
        return (
            f"ended by rank {ending.get('rank')} on {ending.get('host')}: {ending.get('reason')}",
            "problem",
        )
    last = files.attempts[-1] if files.attempts else None
    if last is not None and last.ended is not None and last.ended >= history.started_at:
        cause = last.cause.value if last.cause is not None else "unknown"
        return f"attempt {last.number} ended ({cause}): {last.decision or last.reason}", "problem"
    if not steps:
        age_s = now - history.started_at
        return f"no step yet, for {in_words(max(0.0, age_s))}", "note" if age_s < 60 else "problem"
    age_s = now - steps[-1].time
    gaps = [b.time - a.time for a, b in pairwise(steps)]
    if age_s > max(SILENT_AFTER_S, 3 * max(gaps, default=0.0)):
        return f"no record for {in_words(age_s)}", "problem"
    return "running", "good"


def _rates(steps: Sequence[RecordedStep]) -> tuple[float, float] | None:
    """Returns steps/s and samples/s, including evaluations and saves."""
    if len(steps) < 2 or steps[-1].time <= steps[0].time:
        return None
    first, last = steps[0], steps[-1]
    seconds = last.time - first.time
    return (last.step - first.step) / seconds, (last.samples - first.samples) / seconds


def _quantiles(steps: Sequence[RecordedStep]) -> tuple[float, float, float] | None:
    if not steps:
        return None
    p50, p95, p99 = np.quantile([each.seconds["step"] for each in steps], (0.5, 0.95, 0.99))
    return float(p50), float(p95), float(p99)


def _parts(history: RunHistory, steps: Sequence[RecordedStep]) -> tuple[Mapping[str, float], str]:
    """Returns the shares of a step's parts, and a text that says from which ranks and steps they are computed.

    These are all ranks if the ranks have been compared, else rank 0.
    """
    found = history.efficiency
    if found is not None and found["step_s"] > 0:
        # Records of earlier versions do not have all parts.
        shares = {name: found["parts"].get(name, 0.0) / found["step_s"] for name in PART_NAMES}
        return shares, f"all ranks, {found['steps']} steps to step {found['step']}"
    total = sum(each.seconds["step"] for each in steps)
    if total <= 0:
        return {}, ""

    def share(name: str) -> float:
        return sum(each.seconds.get(name, 0.0) for each in steps) / total

    shares = {name: share(name) for name in PART_KEYS}
    parts = divided(shares, hidden=min(shares["hidden_sync"], shares["compute"]), waiting=0.0)
    of = f"rank 0, last {len(steps)} steps"
    if history.num_ranks > 1:
        of += "; waiting for slower ranks is in exposed reduction until the ranks have been compared"
    return parts, of


def _slowest(history: RunHistory, environment: Mapping[str, Any]) -> list[RankTime]:
    """Returns the slowest of the ranks whose records were read; [] if there are fewer than two.

    Compares the steps that all of them have recorded.
    """
    newest = {each.step for each in history.steps.get(0, ())}
    by_rank = {rank: {each.step: each.own_s for each in steps} for rank, steps in history.steps.items()}
    # A rank that no longer records may have left records of an earlier start.
    by_rank = {rank: times for rank, times in by_rank.items() if len(times.keys() & newest) >= _LEAST_STEPS}
    common = newest.intersection(*by_rank.values())
    if len(by_rank) < 2 or len(common) < _LEAST_STEPS:
        return []
    own = {rank: sum(times[step] for step in common) / len(common) for rank, times in by_rank.items()}
    usual = float(np.median(list(own.values())))
    return [
        RankTime(
            rank=rank, node=str(environment["ranks"][rank]["node"]), own_s=own[rank],
            factor=own[rank] / usual if usual > 0 else 1.0,
        )
        for rank in sorted(own, key=lambda rank: -own[rank])[:_SLOWEST]
    ]  # fmt: skip


def _left_s(start: Record, attempts: Sequence[Attempt], *, now: float) -> float | None:
    """Returns the time until the allocation ends or the recipe's `stop.after_s` is reached, whichever is earlier."""
    ends = []
    if attempts and attempts[-1].ended is None and attempts[-1].time_limit is not None:
        ends.append(attempts[-1].time_limit)
    after_s = start.get("recipe", {}).get("stop", {}).get("after_s")
    if after_s is not None:
        ends.append(float(start["time"]) + float(after_s))
    return min(ends) - now if ends else None


def _quality(evaluation: Record | None) -> str:
    if evaluation is None:
        return ""
    found = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in evaluation["quality"].items()
    )
    return f"{found} after step {evaluation['step']:,}"


def _notes(files: RunFiles) -> list[str]:
    found = []
    for slow in (files.slow or {}).get("slow", ()):
        ranks = ", ".join(map(str, slow["ranks"]))
        unit, scale = ("MB/s", 1e-6) if slow["cause"] == "network" else ("ms", 1e3)
        found.append(
            f"slow now: {slow['cause']} of ranks {ranks} on {', '.join(slow['nodes'])}: {scale * slow['value']:,.3g} "
            f"{unit}, usual {scale * slow['usual']:,.3g}; the others wait {1e3 * slow['wait_s']:,.3g} ms per step"
        )
    if files.micro_batch is not None:
        found.append(
            f"micro-batches of at most {files.micro_batch.get('samples')} samples, since memory ran out"
        )
    sections = (files.limits or {}).get("sections", {})
    limits = {
        name: about["derived_s"] or about["limit_s"] for name, about in sections.items() if about["measured"]
    }
    if limits:
        shown = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in limits.items())
        found.append(f"time limits of waits: {shown}")
    return found


def _attempts(attempts: Sequence[Attempt]) -> list[str]:
    """Returns one line for each of the last attempts that have ended."""
    ended = [each for each in attempts if each.ended is not None][-_SLOWEST:]
    return [
        f"attempt {each.number}: {each.cause.value if each.cause else 'ended'} after "
        f"{in_words((each.ended or each.began) - each.began)}; {each.decision or each.reason}"
        for each in ended
    ]
