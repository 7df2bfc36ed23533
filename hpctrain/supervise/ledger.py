"""The ledger of attempts: one JSON line per start of the ranks by `hpctrain supervise`, in the file `attempts.jsonl`.

Only the supervisor writes this file. Each time the whole file is replaced, so that readers never see half a line; this
costs little, since a run has few attempts. `docs/metrics.md` describes the fields. `RunProgress` reads from the run
directory how far an attempt has come.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint import finished_newest_first, step_of
from hpctrain.errors import CheckpointError, LaunchError
from hpctrain.storage import replace_file
from hpctrain.supervise.classify import AttemptEnd, Diagnosis, Evidence, classify

FILE_NAME = "attempts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks. Times are in seconds since 1970, by the supervisor's clock.

    number: 1 for the first attempt in this run directory, 2 for the second, and so on.
    job: id of the Slurm job, or `local-...` for one supervisor outside Slurm.
    allocation: 0 for the first allocation of the job, 1 after the first requeue, and so on.
    nodes: names of the nodes.
    ranks: number of ranks.
    began: start of the launcher.
    training_began: start of training; None if training never started.
    lost_at: first sign that a rank or node was lost; None if there was no such sign before the end.
    ended: end of the attempt; None if the attempt still runs, or if the supervisor was ended together with the attempt.
    first_step: number of steps done before training started; None if training never started.
    last_step: last step that was recorded.
    checkpoint_step: step from which the next attempt continued. Until training starts again, this is an estimate: the
    step of the newest checkpoint in the shared folder at the end.
    steps_gained, steps_lost: number of this attempt's steps before and after `checkpoint_step`: the steps on which the
    next attempt builds, and the steps that the next attempt has to repeat.
    time_limit: end of the allocation by its time limit; None if unknown or unlimited.
    exit_code, cause, reason: how and why the attempt ended, see `Evidence` and `Diagnosis`.
    blamed: nodes to which the failure is attributed.
    error: see `Diagnosis`.
    decision: what the supervisor did after the attempt, and why.
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
    cause: AttemptEnd | None = None
    reason: str = ""
    blamed: tuple[str, ...] = ()
    error: str = ""
    decision: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cause": None if self.cause is None else self.cause.value}

    @classmethod
    def from_json(cls, values: Any) -> Attempt:
        """Builds an attempt from its JSON values. Raises TypeError or ValueError if the values are wrong."""
        if not isinstance(values, dict):
            raise TypeError("a line is not a JSON object")
        known = {field.name for field in fields(cls)}
        found = {name: value for name, value in values.items() if name in known}
        for name in ("nodes", "blamed"):
            found[name] = tuple(found.get(name, ()))
        found["cause"] = None if found.get("cause") is None else AttemptEnd(found["cause"])
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
        """Replaces the attempt that has the same number."""
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
    """Returns the attempts recorded in a run directory, oldest first; () if it has no attempts.jsonl.

    Raises LaunchError if the file cannot be read.
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
    """How much of the time of a run was effective.

    wall_s: seconds of all ended attempts, and of the time between attempts in one allocation.
    effective_s: seconds of `wall_s` that were spent on steps that no later attempt had to repeat.
    """

    wall_s: float
    effective_s: float

    @property
    def share(self) -> float:
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0


def effective_time(attempts: Sequence[Attempt]) -> EffectiveTime:
    """Returns how much of the attempts' time advanced the run. Attempts that still run are left out. A pure function.

    Of the training time of an attempt, the fraction gained / (gained + lost) is effective, where `gained` and `lost`
    are the attempt's `steps_gained` and `steps_lost`. Start-up, failures and the time between attempts in one
    allocation count as wall time; the time in which a job waits in the queue does not.
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


# The line of a start contains the whole environment; the step is among its first fields (`hpctrain/run/training.py`).
_START = re.compile(rb'^\{"time": [\d.e+]+, "step": (\d+),', re.MULTILINE)
STEPS = Path("metrics", "rank-00000.jsonl")
_MAX_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


@final
class RunProgress:
    """Progress of one attempt, read from the run directory. Create the object before the attempt starts.

    directory: the run directory.
    checkpoints: folder of the finished checkpoints.

    New content is found by comparing files with their state when the object was created, not by times, because the
    clocks of nodes may differ. Files are opened for each look, because over NFS the size of a file is current only
    after an open.
    """

    def __init__(self, directory: Path, *, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._starts = _NewContent(directory / "starts.jsonl")
        self._steps = _NewContent(directory / STEPS)
        self._ending = _NewContent(directory / "watch" / "ending.json")

    @classmethod
    def of_all(cls, directory: Path, *, checkpoints: Path) -> RunProgress:
        """Returns the progress of an attempt that has ended, from everything that the directory records."""
        progress = cls(directory, checkpoints=checkpoints)
        for content in (progress._starts, progress._steps, progress._ending):
            content.forget()
        return progress

    def first_step(self) -> int | None:
        """Returns the step from which training started: 0, or the step of a checkpoint. None before that."""
        found = _START.findall(self._starts.read(_MAX_BYTES))
        return int(found[-1]) if found else None

    def last_step(self) -> int | None:
        """Returns the last step in rank 0's records, which may be a second behind; None if no step is recorded."""
        for line in reversed(self._steps.read(_TAIL_BYTES).split(b"\n")[:-1]):
            try:
                record = json.loads(line)
            except ValueError:  # the first of these lines may be cut
                continue
            if isinstance(record, dict) and record.get("kind") == "step":
                return int(record["step"])
        return None

    def newest_checkpoint(self) -> int | None:
        """Returns the step of the newest finished checkpoint in the shared folder; None if there is no checkpoint."""
        try:
            paths = finished_newest_first(self._checkpoints)
        except CheckpointError:
            return None
        return step_of(paths[0]) if paths else None

    def announced_ending(self) -> str | None:
        """Returns the reason that a rank announced for the end of the run (`watch/ending.json`); else None."""
        try:
            ending = json.loads(self._ending.read(_TAIL_BYTES))
            return f"hpctrain: rank {ending['rank']} on {ending['host']} ends the run: {ending['reason']}"
        except (ValueError, KeyError, TypeError):
            return None


class _NewContent:
    """The content of a file that was added, or that replaced the file, after this object was created."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._size = 0, 0
        try:
            found = os.stat(path)
        except OSError:
            return
        self._inode, self._size = found.st_ino, found.st_size

    def forget(self) -> None:
        """Treats the whole file as new."""
        self._inode, self._size = 0, 0

    def read(self, max_bytes: int) -> bytes:
        """Returns the new content, at most its last `max_bytes`."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                is_same = found.st_ino == self._inode and found.st_size >= self._size
                begin = max(self._size if is_same else 0, found.st_size - max_bytes)
                file.seek(begin)
                return file.read(max_bytes)
        except OSError:
            return b""


def record_begin_of_training(ledger: Ledger, *, first_step: int, at: float) -> float | None:
    """Records that the last attempt trains from `first_step` on, and how many steps of the previous training were kept.

    The kept steps are known only now, since the storage of the nodes may have held a newer checkpoint than the shared
    folder. Returns the time at which the previous attempt was lost or ended, in seconds since 1970; None if this is the
    first training of the job.
    """
    *earlier, attempt = ledger.attempts
    ledger.replace(replace(attempt, training_began=at, first_step=first_step))
    trained = [entry for entry in earlier if entry.job == attempt.job and entry.first_step is not None]
    if not trained:
        return None
    ledger.replace(_with_steps(trained[-1], reached=first_step))
    last = earlier[-1]
    return last.lost_at or last.ended


def record_end(
    ledger: Ledger,
    progress: RunProgress,
    *,
    exit_code: int | None,
    diagnosis: Diagnosis,
    ended: float,
    lost_at: float | None = None,
) -> Attempt:
    """Records the end of the last attempt, and returns it. See `Attempt` for the arguments."""
    attempt = ledger.attempts[-1]
    finished = replace(
        attempt,
        ended=ended,
        lost_at=lost_at,
        last_step=progress.last_step(),
        exit_code=exit_code,
        cause=diagnosis.cause,
        reason=diagnosis.reason,
        blamed=diagnosis.nodes,
        error=diagnosis.error,
    )
    reached = max(progress.newest_checkpoint() or 0, attempt.first_step or 0)
    finished = _with_steps(finished, reached=reached)
    ledger.replace(finished)
    return finished


def close_open_attempt(ledger: Ledger, *, directory: Path, checkpoints: Path) -> None:
    """Completes the record of the last attempt, if the supervisor was ended together with the attempt."""
    if not ledger.attempts or ledger.attempts[-1].ended is not None:
        return
    attempt = ledger.attempts[-1]
    ended = attempt.began
    with contextlib.suppress(OSError):
        ended = max(ended, (directory / STEPS).stat().st_mtime)
    diagnosis = classify(Evidence(exit_code=None, ended=ended, time_limit=attempt.time_limit))
    progress = RunProgress.of_all(directory, checkpoints=checkpoints)
    record_end(ledger, progress, exit_code=None, diagnosis=diagnosis, ended=ended)


def _with_steps(attempt: Attempt, *, reached: int) -> Attempt:
    """Returns the attempt with its gained and lost steps, if the next attempt continues from step `reached`."""
    if attempt.first_step is None:
        return replace(attempt, checkpoint_step=reached, steps_gained=0, steps_lost=0)
    last = attempt.last_step if attempt.last_step is not None else attempt.first_step
    return replace(
        attempt,
        checkpoint_step=reached,
        steps_gained=max(0, reached - attempt.first_step),
        steps_lost=max(0, last - reached),
    )
