"""Ledger of attempts: one JSON line for each start of a run by `hpctrain supervise`, in the file `attempts.jsonl`.

The supervisor is its only writer. The file is replaced as a whole, so that readers never see half a line; a run has few
attempts. `docs/metrics.md` describes the fields.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError
from hpctrain.storage import replace_file
from hpctrain.supervise.causes import Cause

FILE_NAME = "attempts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks. Times are seconds since 1970, by the supervisor's clock.

    number: 1 for the first in this run directory. job: the Slurm job, or `local-...` of one supervisor outside Slurm.
    allocation: counts the job's allocations (0, then 1 after a requeue). began: the launcher was started.
    training_began, first_step: training began after so many steps; None if it never did. last_step: last one
    recorded. lost_at: first sign that a rank or node was lost; None if there was none before the end. ended: all was
    over; None: the attempt still runs, or its supervisor was ended with it. time_limit: when Slurm would have ended
    the allocation (epoch). blamed: nodes to which the failure is attributed. error: see `Diagnosis`. checkpoint_step:
    of the newest checkpoint in the shared folder at the end. steps_gained, steps_lost: steps that the next start did
    and did not build on; before it has begun, what the newest checkpoint in the shared folder leads to expect.
    """

    number: int
    job: str
    allocation: int
    nodes: tuple[str, ...]
    ranks: int
    began: float
    training_began: float | None = None
    lost_at: float | None = None
    ended: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    checkpoint_step: int | None = None
    steps_gained: int | None = None
    steps_lost: int | None = None
    time_limit: float | None = None
    exit_code: int | None = None
    cause: Cause | None = None
    reason: str = ""
    blamed: tuple[str, ...] = ()
    error: str = ""
    decision: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cause": None if self.cause is None else self.cause.value}

    @classmethod
    def from_json(cls, values: Any) -> Attempt:
        """Raises TypeError or ValueError if these are not the values of an attempt."""
        if not isinstance(values, dict):
            raise TypeError("a line is not a JSON object")
        known = {field.name for field in fields(cls)}
        found = {name: value for name, value in values.items() if name in known}
        for name in ("nodes", "blamed"):
            found[name] = tuple(found.get(name, ()))
        found["cause"] = None if found.get("cause") is None else Cause(found["cause"])
        return cls(**found)


class Ledger:
    """The attempts in one run directory, oldest first. Raises LaunchError if the file cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.attempts = list(read_attempts(directory))

    def add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self._write()

    def replace(self, attempt: Attempt) -> None:
        """Replaces the attempt of the same number."""
        self.attempts = [attempt if old.number == attempt.number else old for old in self.attempts]
        self._write()

    def _write(self) -> None:
        lines = [json.dumps(attempt.to_json(), allow_nan=False) + "\n" for attempt in self.attempts]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(f".{FILE_NAME}.{os.getpid()}.partial")
            replace_file(self.path, "".join(lines).encode(), partial=partial)
        except OSError as error:  # a full disk must not end the supervisor, which knows the attempts
            print(
                f"hpctrain supervise: WARNING: the ledger {self.path} cannot be written: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )


def read_attempts(directory: Path) -> tuple[Attempt, ...]:
    """Returns the attempts recorded in a run directory, oldest first; none if there is no ledger.

    Raises LaunchError if it cannot be read.
    """
    path = directory / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise LaunchError(f"the ledger {path} cannot be read: {error.strerror}") from error
    try:
        return tuple(Attempt.from_json(json.loads(line)) for line in lines)
    except (TypeError, ValueError) as error:
        raise LaunchError(
            f"the ledger {path} is not one that `hpctrain supervise` has written ({error}): move it away"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveTime:
    """wall_s: from the first start to the last end. effective_s: the part spent on steps that no later attempt had to
    repeat."""

    wall_s: float
    effective_s: float

    @property
    def share(self) -> float:
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0


def effective_time(attempts: Sequence[Attempt]) -> EffectiveTime:
    """Returns how much of the attempts' time advanced the run. Pure. Attempts that still run are left out.

    An attempt's time of training counts in the proportion of its steps that were not lost. Start-up, failures and the
    time between attempts of one job count as wall time; the time in which a job waits in the queue does not.
    """
    wall_s = effective_s = 0.0
    previous: Attempt | None = None
    for attempt in attempts:
        if attempt.ended is None:
            continue
        wall_s += attempt.ended - attempt.began
        if previous is not None and (previous.job, previous.allocation) == (attempt.job, attempt.allocation):
            wall_s += max(0.0, attempt.began - (previous.ended or attempt.began))
        previous = attempt
        gained, lost = attempt.steps_gained or 0, attempt.steps_lost or 0
        if attempt.training_began is not None and gained > 0:
            trained_s = (attempt.lost_at or attempt.ended) - attempt.training_began
            effective_s += max(0.0, trained_s) * gained / (gained + lost)
    return EffectiveTime(wall_s=wall_s, effective_s=effective_s)
