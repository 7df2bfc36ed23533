"""When a run has to have ended: from the recipe and the environment. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from hpctrain.errors import LaunchError
from hpctrain.telemetry import in_words

DEADLINE_VARIABLE = "HPCTRAIN_DEADLINE"
# Set by Slurm since 23.02. Slurm is asked as well, since the limit of a running job can be changed.
SLURM_END_VARIABLE = "SLURM_JOB_END_TIME"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndTime:
    """A moment at which the run has to have ended. at_s: seconds since 1970. source: who says so, for messages."""

    at_s: float
    source: str

    def describe(self, now_s: float) -> str:
        """For example `18:00:00, in 59 min (Slurm's time limit)`; the date is left out within a day."""
        left_s = self.at_s - now_s
        at = datetime.fromtimestamp(self.at_s)
        clock = f"{at:%H:%M:%S}" if abs(left_s) < 86_400 else f"{at:%Y-%m-%d %H:%M:%S}"
        return f"{clock}, {f'in {in_words(left_s)}' if left_s >= 0 else 'already over'} ({self.source})"


def earliest(ends: Iterable[EndTime]) -> EndTime | None:
    return min(ends, key=lambda end: end.at_s, default=None)


def ends_known_at_start(
    environ: Mapping[str, str], *, started_s: float, stop_after_s: float | None
) -> list[EndTime]:
    """Returns the ends that need not be asked for, without Slurm's.

    started_s: when this start of the run began, seconds since 1970. stop_after_s: the recipe's `stop.after_s`.
    Raises LaunchError if HPCTRAIN_DEADLINE cannot be read.
    """
    ends = []
    if stop_after_s is not None:
        ends.append(EndTime(at_s=started_s + stop_after_s, source="stop.after_s of the recipe"))
    if text := environ.get(DEADLINE_VARIABLE, "").strip():
        ends.append(EndTime(at_s=parse_deadline(text), source=DEADLINE_VARIABLE))
    return ends


def parse_deadline(text: str) -> float:
    """Returns a moment in seconds since 1970. text: these seconds, or ISO 8601; without a zone it is local time.

    Raises LaunchError if it is neither.
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
