"""Rules of restarting: what to do after an attempt, and which nodes are excluded. Pure functions of the attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hpctrain.errors import ExitCode
from hpctrain.supervise.classify import AttemptEnd
from hpctrain.supervise.ledger import Attempt

# Causes that may be the fault of a node. Out of memory is not one: mostly the program needs too much, wherever it runs.
_BLAMES_NODES = (AttemptEnd.LOST_NODE, AttemptEnd.LOST_RANK, AttemptEnd.HANG)
# Errors that a restart repeats, unless they were temporary: if they occur a second time, they were not.
_LIKELY_TO_REPEAT = (
    AttemptEnd.USER_ERROR,
    AttemptEnd.DATA,
    AttemptEnd.CHECKPOINT,
    AttemptEnd.DISK_FULL,
    AttemptEnd.OUT_OF_MEMORY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits of restarting.

    max_restarts: largest number of restarts in one allocation.
    node_budget: number of failures attributed to a node after which the node is excluded.
    exclude_for_s: seconds for which such a node is excluded, counted from the node's last failure. Failures longer ago
    than `exclude_for_s` do not count.
    max_without_progress: number of consecutive restarts without a newer checkpoint after which the run is given up.
    min_nodes: smallest number of nodes to train on.
    """

    max_restarts: int = 10
    node_budget: int = 2
    exclude_for_s: float = 86400.0
    max_without_progress: int = 3
    min_nodes: int = 1


class Action(Enum):
    """What the supervisor does after an attempt.

    RESTART: start the ranks again.
    REQUEUE: end, so that the job is queued again.
    GIVE_UP: end, and do not queue the job again.
    END: end, because nothing remains to be done, or the user has ended the run.
    """

    RESTART = "restart"
    REQUEUE = "requeue"
    GIVE_UP = "give up"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Action
    reason: str


def decide(attempts: Sequence[Attempt], *, limits: RestartLimits) -> Decision:
    """Returns what to do after the last attempt, which must have ended.

    Attempts of other jobs do not count: a user who submits a new job knows why the previous one ended.
    """
    last = attempts[-1]
    of_job = [attempt for attempt in attempts if attempt.job == last.job]
    cause = last.cause
    assert cause is not None
    if cause in (AttemptEnd.FINISHED, AttemptEnd.CANCELLED):
        return Decision(action=Action.END, reason=cause.value)
    if last.exit_code == ExitCode.USAGE and cause is AttemptEnd.USER_ERROR:
        return Decision(
            action=Action.GIVE_UP, reason="the command or the recipe cannot be carried out as it is"
        )
    if (
        last.error
        and cause in _LIKELY_TO_REPEAT
        and any(attempt.error == last.error and attempt.cause is cause for attempt in of_job[:-1])
    ):
        return Decision(action=Action.GIVE_UP, reason=f"the same error ({cause.value}) a second time")
    vain = restarts_without_progress(of_job)
    if vain >= limits.max_without_progress:
        return Decision(
            action=Action.GIVE_UP, reason=f"{vain} restarts in a row have led to no newer checkpoint"
        )
    # The job's script then finds the wish of the ranks for other nodes.
    if cause in (AttemptEnd.WALL_CLOCK, AttemptEnd.PREEMPTION, AttemptEnd.OTHER_NODES):
        return Decision(action=Action.REQUEUE, reason=cause.value)
    if cause is AttemptEnd.HANG and last.training_began is None and not last.blamed:
        # srun itself may hang, and would in the same allocation again.
        return Decision(
            action=Action.REQUEUE, reason="training did not begin, and no node is known to be at fault"
        )
    if cause is AttemptEnd.RESIZED:
        return Decision(action=Action.RESTART, reason=cause.value)
    here = -1 + sum(
        attempt.allocation == last.allocation and attempt.cause is not AttemptEnd.RESIZED
        for attempt in of_job
    )
    if here >= limits.max_restarts:
        return Decision(
            action=Action.REQUEUE, reason=f"{here} restarts in this allocation are the limit (--max-restarts)"
        )
    return Decision(action=Action.RESTART, reason=cause.value)


def needs_smaller_micro_batches(attempt: Attempt) -> bool:
    """Returns True if the attempt ran out of memory although its micro-batches could still be divided.

    This happens if the kernel kills a rank: the rank then gets no error, and cannot divide its micro-batches. Exit code
    8 means that dividing the micro-batches does not help.
    """
    return attempt.cause is AttemptEnd.OUT_OF_MEMORY and attempt.exit_code != ExitCode.OUT_OF_MEMORY


def restarts_without_progress(of_job: Sequence[Attempt]) -> int:
    """Returns how many of the last consecutive restarts of the job led to no newer checkpoint.

    of_job: attempts of one job, oldest first. The first attempt is not a restart.
    """
    count = 0
    for before, attempt in zip(of_job[-2::-1], of_job[:0:-1], strict=False):
        if _reached(attempt) > _reached(before):
            break
        count += 1
    return count


def _reached(attempt: Attempt) -> int:
    """Returns the step from which the next attempt can continue, as far as it is known."""
    return max(attempt.first_step or 0, attempt.checkpoint_step or 0)


def excluded_nodes(attempts: Sequence[Attempt], *, limits: RestartLimits, now: float) -> dict[str, float]:
    """Returns the nodes that have used up their failure budget, each with the time until which the node is excluded.

    Times are in seconds since 1970. The result depends only on the recorded attempts, so exclusions also apply after a
    requeue and in new jobs with the same run directory.
    """
    failures: dict[str, list[float]] = {}
    for attempt in attempts:
        if attempt.cause in _BLAMES_NODES and attempt.ended is not None:
            for node in attempt.blamed:
                failures.setdefault(node, []).append(attempt.ended)
    excluded = {}
    for node, times in failures.items():
        recent = [time for time in times if time + limits.exclude_for_s > now]
        if len(recent) >= limits.node_budget:
            excluded[node] = max(recent) + limits.exclude_for_s
    return excluded


def choose_nodes(usable: Sequence[str], *, wanted: int, in_use: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns up to `wanted` of the usable nodes, in the order of `usable`.

    Nodes in `in_use`, those of the last attempt, are preferred to other nodes.
    """
    preferred = [node for node in usable if node in in_use]
    chosen = {*preferred[:wanted]}
    for node in usable:
        if len(chosen) < wanted:
            chosen.add(node)
    return tuple(node for node in usable if node in chosen)
