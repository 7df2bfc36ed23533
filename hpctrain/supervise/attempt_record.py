"""Records in the ledger how far an attempt came: when training begins, at its end, and when the next one continues from
it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from hpctrain.supervise.causes import Diagnosis
from hpctrain.supervise.classify import Evidence, classify
from hpctrain.supervise.ledger import Attempt, Ledger
from hpctrain.supervise.run_progress import STEPS, RunProgress


def record_begin_of_training(ledger: Ledger, *, first_step: int, at: float) -> float | None:
    """Records that the last attempt trains from `first_step` on, and what that says of the one before it.

    Only now it is known from where training could continue: the nodes' own storage may have held a newer checkpoint
    than the shared folder. Returns when that attempt was lost (epoch); None if this job has trained for the first
    time.
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
    """Records the end of the last attempt, and returns it. Arguments: see `Attempt`."""
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
    """Completes the record of an attempt whose supervisor was ended with it, if the last one is such."""
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
    """Returns the attempt with what is known about its steps if the next one continues from step `reached`."""
    if attempt.first_step is None:
        return replace(attempt, checkpoint_step=reached, steps_gained=0, steps_lost=0)
    last = attempt.last_step if attempt.last_step is not None else attempt.first_step
    return replace(
        attempt,
        checkpoint_step=reached,
        steps_gained=max(0, reached - attempt.first_step),
        steps_lost=max(0, last - reached),
    )
