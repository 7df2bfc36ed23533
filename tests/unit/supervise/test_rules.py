"""What follows from the attempts so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.supervise.classify import AttemptEnd
from hpctrain.supervise.ledger import Attempt
from hpctrain.supervise.rules import (
    Action,
    RestartLimits,
    choose_nodes,
    decide,
    excluded_nodes,
    needs_smaller_micro_batches,
    restarts_without_progress,
)

HOUR_S = 3600.0


def attempts(*ends: tuple[AttemptEnd, int], **more: Any) -> list[Attempt]:
    """One job's attempts, each with its cause and the step of the newest checkpoint at its end."""
    return [
        Attempt(
            number=number,
            job="12",
            allocation=0,
            nodes=("a", "b"),
            ranks=2,
            began=100.0 * number,
            training_began=100.0 * number + 5,
            ended=100.0 * number + 50,
            first_step=0,
            checkpoint_step=step,
            cause=cause,
            exit_code=1,
            **more,
        )
        for number, (cause, step) in enumerate(ends, 1)
    ]


@pytest.mark.parametrize(
    ("cause", "action"),
    [
        (AttemptEnd.FINISHED, Action.END),
        (AttemptEnd.RESIZED, Action.RESTART),
        (AttemptEnd.CANCELLED, Action.END),
        (AttemptEnd.WALL_CLOCK, Action.REQUEUE),
        (AttemptEnd.PREEMPTION, Action.REQUEUE),
        (AttemptEnd.OTHER_NODES, Action.REQUEUE),
        (AttemptEnd.LOST_NODE, Action.RESTART),
        (AttemptEnd.LOST_RANK, Action.RESTART),
        (AttemptEnd.OUT_OF_MEMORY, Action.RESTART),
        (AttemptEnd.HANG, Action.RESTART),
        (AttemptEnd.DATA, Action.RESTART),
        (AttemptEnd.CHECKPOINT, Action.RESTART),
        (AttemptEnd.DISK_FULL, Action.RESTART),
        (AttemptEnd.USER_ERROR, Action.RESTART),
        (AttemptEnd.UNKNOWN, Action.RESTART),
    ],
)
def test_each_cause_alone_has_its_action(cause: AttemptEnd, action: Action) -> None:
    assert decide(attempts((cause, 10)), limits=RestartLimits()).action is action


def test_a_command_that_cannot_be_carried_out_is_not_tried_again() -> None:
    (only,) = attempts((AttemptEnd.USER_ERROR, 0))
    usage = replace(only, exit_code=2)
    assert decide([usage], limits=RestartLimits()).action is Action.GIVE_UP


def test_the_same_user_error_a_second_time_ends_it_whatever_came_between() -> None:
    same = attempts(
        (AttemptEnd.USER_ERROR, 10),
        (AttemptEnd.LOST_RANK, 20),
        (AttemptEnd.USER_ERROR, 30),
        error="KeyError: 'x'",
    )
    decision = decide(same, limits=RestartLimits())
    assert decision.action is Action.GIVE_UP
    assert "user error" in decision.reason


def test_memory_that_ran_out_ends_it_the_second_time_only_where_it_will_come_again() -> None:
    killed = attempts((AttemptEnd.OUT_OF_MEMORY, 10), (AttemptEnd.OUT_OF_MEMORY, 20))
    assert decide(killed, limits=RestartLimits()).action is Action.RESTART
    indivisible = [replace(attempt, error="a micro-batch of one sample") for attempt in killed]
    assert decide(indivisible, limits=RestartLimits()).action is Action.GIVE_UP


def test_only_what_a_smaller_micro_batch_may_help_begins_again_with_one() -> None:
    (killed,) = attempts((AttemptEnd.OUT_OF_MEMORY, 10))
    assert needs_smaller_micro_batches(replace(killed, exit_code=137))
    assert not needs_smaller_micro_batches(replace(killed, exit_code=8))
    (lost,) = attempts((AttemptEnd.LOST_RANK, 10))
    assert not needs_smaller_micro_batches(replace(lost, exit_code=137))


def test_another_user_error_is_tried_again() -> None:
    first, second = attempts((AttemptEnd.USER_ERROR, 10), (AttemptEnd.USER_ERROR, 20))
    first = replace(first, error="KeyError: 'x'")
    second = replace(second, error="KeyError: 'y'")
    assert decide([first, second], limits=RestartLimits()).action is Action.RESTART


def test_three_restarts_without_a_newer_checkpoint_end_it() -> None:
    vain = [(AttemptEnd.LOST_RANK, 40)]
    assert decide(attempts(*vain * 3), limits=RestartLimits()).action is Action.RESTART
    assert restarts_without_progress(attempts(*vain * 4)) == 3
    assert decide(attempts(*vain * 4), limits=RestartLimits()).action is Action.GIVE_UP


def test_a_newer_checkpoint_makes_the_count_begin_anew() -> None:
    ends = [(AttemptEnd.LOST_RANK, step) for step in (40, 40, 40, 50, 50)]
    assert restarts_without_progress(attempts(*ends)) == 1
    assert decide(attempts(*ends), limits=RestartLimits()).action is Action.RESTART


def test_a_job_whose_time_limit_is_too_short_for_a_checkpoint_is_not_queued_for_ever() -> None:
    assert (
        decide(attempts(*[(AttemptEnd.WALL_CLOCK, 0)] * 4), limits=RestartLimits()).action is Action.GIVE_UP
    )


def test_more_restarts_than_allowed_in_one_allocation_queue_the_job_again() -> None:
    ends = [(AttemptEnd.LOST_RANK, 10 * number) for number in range(1, 5)]
    limits = RestartLimits(max_restarts=3)
    assert decide(attempts(*ends[:3]), limits=limits).action is Action.RESTART
    decision = decide(attempts(*ends), limits=limits)
    assert decision.action is Action.REQUEUE
    assert "--max-restarts" in decision.reason
    # The next allocation of the job has its own count.
    last = replace(attempts(*ends, (AttemptEnd.LOST_RANK, 50))[-1], allocation=1)
    assert decide([*attempts(*ends), last], limits=limits).action is Action.RESTART


def test_a_launch_in_which_training_never_began_falls_back_to_requeue() -> None:
    (only,) = attempts((AttemptEnd.HANG, 0))
    late = replace(only, training_began=None)
    assert decide([late], limits=RestartLimits()).action is Action.REQUEUE
    blamed = replace(late, blamed=("a",))
    assert decide([blamed], limits=RestartLimits()).action is Action.RESTART


def test_attempts_of_an_earlier_job_do_not_count() -> None:
    before = [
        replace(attempt, job="11")
        for attempt in attempts(*[(AttemptEnd.USER_ERROR, 0)] * 3, error="KeyError")
    ]
    now = attempts((AttemptEnd.USER_ERROR, 0), error="KeyError")
    assert decide([*before, *now], limits=RestartLimits()).action is Action.RESTART


def test_a_node_is_excluded_when_its_budget_is_used_up_and_comes_back() -> None:
    limits = RestartLimits(node_budget=2, exclude_for_s=HOUR_S)
    failed = attempts(
        (AttemptEnd.LOST_NODE, 10), (AttemptEnd.LOST_RANK, 20), (AttemptEnd.USER_ERROR, 30), blamed=("b",)
    )
    assert excluded_nodes(failed[:1], limits=limits, now=300.0) == {}
    # The user error does not count; the second failure ended at 250 s.
    assert excluded_nodes(failed, limits=limits, now=300.0) == {"b": 250.0 + HOUR_S}
    # The first failure, at 150 s, is forgotten.
    assert excluded_nodes(failed, limits=limits, now=151.0 + HOUR_S) == {}


def test_spares_come_after_the_nodes_in_use_and_nodes_that_came_back_are_used_again() -> None:
    assert choose_nodes(["a", "b", "c", "d"], wanted=3) == ("a", "b", "c")
    assert choose_nodes(["a", "c", "d"], wanted=3, in_use=["a", "b", "c"]) == (
        "a",
        "c",
        "d",
    )  # the spare steps in
    assert choose_nodes(["a", "b", "c", "d"], wanted=3, in_use=["a", "c", "d"]) == ("a", "c", "d")
    assert choose_nodes(["a", "c"], wanted=3, in_use=["a", "b", "c"]) == ("a", "c")  # fewer continue
    assert choose_nodes(["a", "b", "c"], wanted=3, in_use=["a", "c"]) == ("a", "b", "c")  # it came back
    assert choose_nodes([], wanted=3) == ()
