"""How much time a run has left. One rank knows it, by its own clock, and asks Slurm in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from hpctrain.resilience.end_time import SLURM_END_VARIABLE, EndTime, earliest, ends_known_at_start
from hpctrain.resilience.slurm_limit import SlurmAnswer, ask_again_after_s, ask_slurm, job_to_ask_about

_SLURM = "Slurm's time limit"
# An end that moves by less is not news: squeue's times are whole seconds.
_NEWS_FROM_S = 2.0


@final
class WallClock:
    """The time that is left until the run has to have ended. For rank 0.

    ends: known at the start. slurm_end_s: Slurm's, seconds since 1970, until Slurm answers; None: not known yet.
    ask: asks Slurm; called in a thread, at once and then every few minutes. None: Slurm is not asked.
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
        """Starts to count. stop_after_s: as in the recipe. Raises LaunchError if HPCTRAIN_DEADLINE cannot be read.

        If Slurm has set the job's end in the environment, that counts until Slurm answers.
        """
        environ = os.environ if environ is None else environ
        ends = ends_known_at_start(environ, started_s=time.time(), stop_after_s=stop_after_s)
        job = job_to_ask_about(environ)
        if job is None:
            return cls(ends)
        text = environ.get(SLURM_END_VARIABLE, "")
        return cls(ends, slurm_end_s=float(text) if text.isdigit() else None, ask=lambda: ask_slurm(job))

    @property
    def end(self) -> EndTime | None:
        """The earliest end that is known; None: no limit is known."""
        return self._end

    def time_left_s(self) -> float | None:
        """Returns the seconds until the end, negative after it; None if no limit is known."""
        end = self._end
        return None if end is None else end.at_s - time.time()

    def news(self) -> str | None:
        """Returns a line for the user if the end has become known, has changed or cannot be found out; else None."""
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
        """Asks no more."""
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
