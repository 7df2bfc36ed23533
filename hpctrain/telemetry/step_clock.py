"""The parts of a step, and the clock that measures them. Also formats durations."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# The table of a step's parts.


class PartKind(enum.Enum):
    """What a rank does in one part of the time of a step. Parts are shown in the order of their kinds."""

    COMPUTING = enum.auto()  # what the share of computing counts as computing
    REDUCTION = enum.auto()  # lowers the parallel efficiency
    PIPELINE = enum.auto()  # lowers the parallel efficiency
    REST = enum.auto()  # lowers the share of computing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of the time that a rank spends on a step, such as waiting for data. All parts add up to the step.

    Attributes:
        name: Name of the part in efficiencies, in reports, and in the metric of all ranks' time.
        key: Name of the part in the records of a rank, and in the metric of that rank's time. Two parts have the same
            key if only a comparison of the ranks can tell them apart.
        letter: The letter that stands for the part in the terminal.
        style: The style of that letter, in the notation of the library rich.
        measured: True if `StepClock` measures the part on the main thread. Other parts are computed from measured
            parts.
        optional: True if the records of some runs or of earlier versions lack the part. The time of the part is then 0.
        note: An explanation for the help text of a metric.
    """

    name: str
    key: str
    kind: PartKind
    letter: str
    style: str
    measured: bool = True
    optional: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")


# In the order of the keys in records.
_TABLE = (
    # Waiting for a batch.
    StepPart(name="input", key="input", kind=PartKind.REST, letter="I", style="black on yellow"),
    # Forward, backward and optimizer. The record includes `hidden_sync`; this part does not.
    StepPart(name="compute", key="compute", kind=PartKind.COMPUTING, letter="C", style="black on blue"),
    # Computing while a reduction runs.
    StepPart(
        name="hidden_reduction", key="hidden_sync", kind=PartKind.COMPUTING, letter="H", style="black on cyan",
        measured=False,
    ),
    # Waiting of this rank's pipeline stages for others. Versions before pipelines did not record it.
    StepPart(
        name="bubble", key="bubble", kind=PartKind.PIPELINE, letter="B", style="black on bright_magenta",
        optional=True, note="waiting for other stages of a pipeline",
    ),
    # Waiting for communication, and for ranks that come to it later than this one.
    StepPart(
        name="exposed_reduction", key="exposed_sync", kind=PartKind.REDUCTION, letter="R", style="black on red"
    ),
    StepPart(
        name="waiting", key="exposed_sync", kind=PartKind.REDUCTION, letter="W", style="black on magenta",
        measured=False, note="for slower ranks",
    ),
    StepPart(name="checkpoint", key="checkpoint", kind=PartKind.REST, letter="S", style="black on green"),
    StepPart(name="evaluation", key="evaluation", kind=PartKind.REST, letter="E", style="black on white"),
    # What no other part covers.
    StepPart(
        name="other", key="other", kind=PartKind.REST, letter="O", style="white on bright_black", measured=False
    ),
)  # fmt: skip

STEP_PARTS = tuple(sorted(_TABLE, key=lambda part: list(PartKind).index(part.kind)))
PART_NAMES = tuple(part.name for part in STEP_PARTS)
# Keys of the seconds in records: of all parts, and of those that the clock measures.
PART_KEYS = tuple(dict.fromkeys(part.key for part in _TABLE))
CLOCK_KEYS = tuple(part.key for part in _TABLE if part.measured)
OPTIONAL_KEYS = frozenset(part.key for part in _TABLE if part.optional)


# Divides the time of a step into named parts.


# Called with the name, start and end of a span, in seconds of `time.perf_counter`.
Observer = Callable[[str, float, float], object]


class StepClock:
    """Measures what the time of a step is spent on: sums seconds by name from one call of `lap` to the next.

    The times of the names in `CLOCK_KEYS` do not overlap, since all of these times are on the main thread. Together
    with `other`, the rest, they add up to `step`.

    The times of other names overlap the times of `CLOCK_KEYS`. `hidden_sync` is the part of `compute` during which a
    reduction ran. `after_sync` is the time from the end of the reduction to the end of the step. `sync` is the total
    time of the reduction, on any thread. `device_compute` is the time of the GPU, measured by events. `own_write` is
    the time in which this rank wrote its part of a checkpoint, on any thread, in the step in which the checkpoint was
    committed.

    observer: a function that is called with name, start and end of each measured time of a name in `CLOCK_KEYS`, in
    seconds of `time.perf_counter`; None: no function.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._seconds = dict.fromkeys(CLOCK_KEYS, 0.0)
        self._lap_started = time.perf_counter()
        self._sync_ended: float | None = None

    @contextmanager
    def span(self, name: str, *, what: str | None = None) -> Iterator[None]:
        """Adds the duration of the `with` block to the seconds of `name`, even if the block raises an error.

        what: the name that is passed to the observer; None: `name`.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, seconds=time.perf_counter() - started, what=what)

    def add(self, name: str, *, seconds: float, ended: float | None = None, what: str | None = None) -> None:
        """Adds `seconds` to the seconds of `name`, one of the things that the time of a step is spent on.

        ended: the end of the span, by `time.perf_counter`; None: now. what: the name for the observer; None: `name`.
        """
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if self.observer is not None and name in CLOCK_KEYS:
            end = time.perf_counter() if ended is None else ended
            self.observer(what or name, end - seconds, end)

    def recount(self, begin: float, end: float, *, of: str, to: str) -> None:
        """Subtracts the time from `begin` to `end` from the seconds of the name `of`, and adds it to those of `to`.

        `begin` and `end` are seconds of `time.perf_counter`.
        """
        self._seconds[of] -= end - begin
        self.add(to, seconds=end - begin, ended=end)

    def sync_ended(self, at: float) -> None:
        """Stores when the step's reduction ended: `at`, in seconds of `time.perf_counter`.

        Only the last call before `lap` counts.
        """
        self._sync_ended = at

    def lap(self) -> dict[str, float]:
        """Returns what the time since the last call was spent on, in seconds by name, and sets all seconds to 0.

        In the result, `step` is the total time, and `other` the time that no name in `CLOCK_KEYS` has. `after_sync` is
        0 if `sync_ended` was not called.
        """
        now = time.perf_counter()
        seconds = self._seconds
        step = now - self._lap_started
        # Clocks read one after another may differ by some ns from their sum.
        seconds["other"] = max(0.0, step - sum([seconds[name] for name in CLOCK_KEYS]))
        seconds["step"] = step
        seconds["after_sync"] = now - self._sync_ended if self._sync_ended is not None else 0.0
        self._seconds = dict.fromkeys(CLOCK_KEYS, 0.0)
        self._lap_started = now
        self._sync_ended = None
        return seconds


# Durations in words.


def in_words(seconds: float) -> str:
    """Returns a duration as text: `0.12 s`, `45 s`, `12 min`, `3.5 h`, `2 days`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit_s, name in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.0f} s"
