"""The time that a run has left, and the moment at which it must stop in order to save in time.

Rank 0 keeps the time by its own clock, and asks Slurm in the background for the end of the job. `TimeToStop` estimates
from measured durations how long a stop takes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import final

from hpctrain.errors import LaunchError
from hpctrain.launch import SlurmUnavailable, ask_once
from hpctrain.telemetry import in_words

DEADLINE_VARIABLE = "HPCTRAIN_DEADLINE"
# Set by Slurm since 23.02. Slurm is asked as well, since the limit of a running job can be changed.
SLURM_END_VARIABLE = "SLURM_JOB_END_TIME"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndTime:
    """A time by which the run must have ended.

    at_s: the time, in seconds since 1970.
    source: what sets this limit, for messages.
    """

    at_s: float
    source: str

    def describe(self, now_s: float) -> str:
        """Returns a text such as `18:00:00, in 59 min (Slurm's time limit)`.

        The date is left out within a day of `now_s`.
        """
        left_s = self.at_s - now_s
        at = datetime.fromtimestamp(self.at_s)
        clock = f"{at:%H:%M:%S}" if abs(left_s) < 86_400 else f"{at:%Y-%m-%d %H:%M:%S}"
        return f"{clock}, {f'in {in_words(left_s)}' if left_s >= 0 else 'already over'} ({self.source})"


def earliest(ends: Iterable[EndTime]) -> EndTime | None:
    return min(ends, key=lambda end: end.at_s, default=None)


def ends_known_at_start(
    environ: Mapping[str, str], *, started_s: float, stop_after_s: float | None
) -> list[EndTime]:
    """Returns the limits that are known without asking Slurm: the recipe's `stop.after_s` and HPCTRAIN_DEADLINE.

    started_s: start of this attempt of the run, in seconds since 1970.
    stop_after_s: the recipe's `stop.after_s`.

    Raises LaunchError if HPCTRAIN_DEADLINE cannot be parsed.
    """
    ends = []
    if stop_after_s is not None:
        ends.append(EndTime(at_s=started_s + stop_after_s, source="stop.after_s of the recipe"))
    if text := environ.get(DEADLINE_VARIABLE, "").strip():
        ends.append(EndTime(at_s=parse_deadline(text), source=DEADLINE_VARIABLE))
    return ends


def parse_deadline(text: str) -> float:
    """Returns the time that `text` states, in seconds since 1970. Raises LaunchError if `text` cannot be parsed.

    text: seconds since 1970, or a time in ISO 8601; a time without a zone is local.
    """
    try:
        seconds = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise LaunchError(
            f"{DEADLINE_VARIABLE} is {text!r}: write seconds since 1970, as `date +%s` prints them, or a time such as "
            "2026-07-30T18:00:00"
        )
    return seconds


# squeue itself waits for a busy controller; `MessageTimeout` is 10 s by default.
SQUEUE_MAY_TAKE_S = 20.0
_ASK_AGAIN_AFTER_S = (60.0, 600.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmAnswer:
    """Slurm's answer to the question when the job ends.

    end_s: end of the job, in seconds since 1970; None if the job has no time limit, or the end is unknown.
    problem: why the end is unknown; None if Slurm answered.
    """

    end_s: float | None = None
    problem: str | None = None


def job_to_ask_about(environ: Mapping[str, str]) -> str | None:
    """Returns the id of this process's job, as squeue and scontrol accept it; None outside a Slurm job.

    In a job array the result is `<array>_<task>`, since SLURM_JOB_ID of one task may be the number of the whole
    array, for which squeue lists every task. In a heterogeneous job, rank 0 is in the first component. The number of
    that component stands for all components, which end together.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or None


def ask_job_end(job: str, *, timeout_s: float = SQUEUE_MAY_TAKE_S) -> SlurmAnswer:
    """Asks Slurm with squeue when `job` ends, by the controller's clock.

    Not collective; call it on one rank only, and rarely.
    """
    try:
        text = ask_once(["squeue", "--noheader", f"--jobs={job}", "--format=%l %e"], timeout_s=timeout_s)
    except SlurmUnavailable as error:
        return SlurmAnswer(problem=str(error))
    return parse_ends(text)


def parse_ends(text: str) -> SlurmAnswer:
    """Returns the earliest end in squeue's output.

    text: lines `LIMIT END`, one per component of the job, with END in seconds since 1970.
    """
    ends = []
    for line in text.splitlines():
        words = line.split()
        if len(words) != 2:
            return SlurmAnswer(problem=f"squeue printed {line!r}, and not a time limit and an end")
        limit, end = words
        if limit == "UNLIMITED":
            continue  # Slurm then names an end a year from now
        if not end.isdigit():
            return SlurmAnswer(problem=f"squeue gives {end!r} as the end of the job")
        ends.append(float(end))
    if not text.strip():
        return SlurmAnswer(problem="squeue does not list the job")
    return SlurmAnswer(end_s=min(ends, default=None))


def ask_again_after_s(time_left_s: float | None) -> float:
    """Returns how many seconds to wait before Slurm is asked again, from 1 to 10 minutes.

    A job's limit can be changed while it runs.
    """
    shortest_s, longest_s = _ASK_AGAIN_AFTER_S
    left_s = math.inf if time_left_s is None else time_left_s
    return min(longest_s, max(shortest_s, left_s / 20))


# How much time a run has left.


_SLURM = "Slurm's time limit"
# An end that moves by less is not reported: squeue's times are whole seconds.
_NEWS_FROM_S = 2.0


@final
class WallClock:
    """Keeps the time that is left until the run must have ended. For rank 0.

    Args:
        ends: Limits that are known at start.
        slurm_end_s: End of the Slurm job to assume until Slurm answers, in seconds since 1970; None if unknown.
        ask: Function that asks Slurm, called in a thread, at once and then every few minutes. None: Slurm is not asked.
    """

    def __init__(
        self,
        ends: Sequence[EndTime] = (),
        *,
        slurm_end_s: float | None = None,
        ask: Callable[[], SlurmAnswer] | None = None,
    ) -> None:
        self._fixed = tuple(ends)
        self._set_slurm_end(slurm_end_s)
        self._printed: EndTime | None = None
        self._problem: str | None = None
        self._ended = threading.Event()
        if ask is not None:
            threading.Thread(
                target=self._ask_for_ever, args=(ask,), name="hpctrain-wall-clock", daemon=True
            ).start()

    @classmethod
    def start(
        cls, environ: Mapping[str, str] | None = None, *, stop_after_s: float | None = None
    ) -> WallClock:
        """Creates the clock of this run: reads the limits from the environment, and in a Slurm job asks Slurm.

        If Slurm has set the job's end in the environment (SLURM_JOB_END_TIME), this end is used until Slurm answers.

        Args:
            environ: Environment variables; None means those of this process.
            stop_after_s: Seconds from now after which the run must have ended (the recipe's `stop.after_s`); None for
                no such limit.

        Raises:
            LaunchError: HPCTRAIN_DEADLINE cannot be parsed.
        """
        environ = os.environ if environ is None else environ
        ends = ends_known_at_start(environ, started_s=time.time(), stop_after_s=stop_after_s)
        job = job_to_ask_about(environ)
        if job is None:
            return cls(ends)
        text = environ.get(SLURM_END_VARIABLE, "")
        return cls(ends, slurm_end_s=float(text) if text.isdigit() else None, ask=lambda: ask_job_end(job))

    @property
    def end(self) -> EndTime | None:
        """The earliest known limit; None if no limit is known."""
        return self._end

    def time_left_s(self) -> float | None:
        """Returns the seconds until the earliest limit, negative after it; None if no limit is known."""
        end = self._end
        return None if end is None else end.at_s - time.time()

    def news(self) -> str | None:
        """Returns a line for the user if the limit has become known, has changed or cannot be found out.

        Otherwise returns None.
        """
        end, problem = self._end, self._problem
        if problem is not None:
            self._problem = None
            return f"note: it is not known when Slurm ends this job ({problem}); a signal still stops the run in time"
        if end is None or (
            self._printed is not None
            and self._printed.source == end.source
            and abs(end.at_s - self._printed.at_s) < _NEWS_FROM_S
        ):
            return None
        changed = "the time limit has changed" if self._printed is not None else "time limit"
        self._printed = end
        return f"{changed}: {end.describe(time.time())}; the run saves and stops before that"

    def close(self) -> None:
        """Stops asking Slurm."""
        self._ended.set()

    # ------------------------------------------------------------------ details

    def _set_slurm_end(self, end_s: float | None) -> None:
        self._slurm_s = end_s
        slurm = [] if end_s is None else [EndTime(at_s=end_s, source=_SLURM)]
        self._end = earliest([*self._fixed, *slurm])

    def _ask_for_ever(self, ask: Callable[[], SlurmAnswer]) -> None:
        said = False
        while not self._ended.is_set():
            answer = ask()
            if answer.problem is None:
                self._set_slurm_end(answer.end_s)
            elif not said and self._slurm_s is None:
                said, self._problem = True, answer.problem
            self._ended.wait(ask_again_after_s(self.time_left_s()))


# A 95th percentile over this many steps ignores the five slowest, among them the first steps.
_STEPS_REMEMBERED = 100
_OTHERS_REMEMBERED = 20


@final
class RecentTimes:
    """The newest `num_kept` durations of a series, in seconds."""

    def __init__(self, num_kept: int) -> None:
        self._seconds: deque[float] = deque(maxlen=num_kept)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def p95(self) -> float | None:
        """Returns the 95th percentile: the smallest duration that at least 95% of the durations do not exceed.

        Returns None if there are no durations yet.
        """
        if not self._seconds:
            return None
        return sorted(self._seconds)[math.ceil(0.95 * len(self._seconds)) - 1]


@final
@dataclass(kw_only=True, slots=True)
class TimeToStop:
    """Estimates how long a stop takes, from the durations measured so far.

    Attributes:
        margin_s: Seconds to allow for what is not measured: the end of the processes, and a step or save that is
            slower than usual.
        assumed_save_s: Duration of a save, in seconds, to assume until one has been measured.
        steps: Measured durations of steps.
        saves: Measured durations of saves, each until its checkpoint was committed.
        evaluations: Measured durations of evaluations.
    """

    margin_s: float
    assumed_save_s: float = 0.0
    steps: RecentTimes = field(default_factory=lambda: RecentTimes(_STEPS_REMEMBERED))
    saves: RecentTimes = field(default_factory=lambda: RecentTimes(_OTHERS_REMEMBERED))
    evaluations: RecentTimes = field(default_factory=lambda: RecentTimes(_OTHERS_REMEMBERED))

    @property
    def save_s(self) -> float:
        """Duration of a save to allow for, in seconds."""
        measured_s = self.saves.p95()
        return self.assumed_save_s if measured_s is None else measured_s

    def needed_s(self, *, num_saves: int = 1, evaluates: bool = False) -> float:
        """Returns the seconds that must be left for the run to do one more step, save and end.

        Args:
            num_saves: Number of saves to wait for, including the last one.
            evaluates: True if an evaluation comes before the next decision.
        """
        evaluation_s = (self.evaluations.p95() or 0.0) if evaluates else 0.0
        return (self.steps.p95() or 0.0) + evaluation_s + num_saves * self.save_s + self.margin_s

    def must_stop(self, time_left_s: float | None, *, num_saves: int = 1, evaluates: bool = False) -> bool:
        """Returns True if less time is left than `needed_s` returns.

        Args:
            time_left_s: Seconds until the run must have ended; None if there is no limit.
            num_saves: Number of saves to wait for, including the last one.
            evaluates: True if an evaluation comes before the next decision.
        """
        return time_left_s is not None and time_left_s < self.needed_s(
            num_saves=num_saves, evaluates=evaluates
        )
