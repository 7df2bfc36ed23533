"""When a step is local, votes or ends a round, and the values of schedules."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.reduce.schedules.rounds import VOTE_EVERY_S, Rounds, StepKind
from hpctrain.reduce.schedules.schedule import METHODS, Daso, parse_schedule, table_of

LETTERS = {StepKind.LOCAL: "l", StepKind.VOTE: "v", StepKind.ENDS_ROUND: "e"}


def kinds(rounds: Rounds, *, steps: int, step_s: float) -> str:
    """What each step exchanges, if each step takes `step_s`; s: synchronous."""
    found = ""
    for _ in range(steps):
        if rounds.is_synchronous:
            found += "s"
            rounds.after_step()
            continue
        kind = rounds.kind
        found += LETTERS[kind]
        rounds.after_step()
        if kind is not StepKind.LOCAL:
            rounds.voted(step_s=step_s)
    return found


@pytest.mark.parametrize(
    ("every", "wait", "from_step", "step_s", "wanted"),
    [
        (4, 0, 0, 1e-3, "vllelllelll"),  # the first step votes, so that the duration of a step becomes known
        (1, 0, 0, 1e-3, "eeeeeeeeeee"),
        (6, 0, 0, VOTE_EVERY_S / 3, "vllvlellvll"),
        (6, 0, 0, 2 * VOTE_EVERY_S, "vvvvvevvvvv"),  # a vote in each step that takes longer
        (4, 0, 3, 1e-3, "sssvllellle"),
        (4, 2, 0, 1e-3, "vllllelllel"),  # an average starts after steps 4 and 8, and arrives two steps later
        (3, 2, 0, 1e-3, "vlllelleLle".lower()),
    ],
)
def test_what_each_step_exchanges(every: int, wait: int, from_step: int, step_s: float, wanted: str) -> None:
    rounds = Rounds(every=every, wait=wait, from_step=from_step)
    assert kinds(rounds, steps=len(wanted), step_s=step_s) == wanted


def test_a_step_that_all_ranks_drop_is_not_counted() -> None:
    rounds = Rounds(every=2, wait=0, from_step=0)
    rounds.after_step()
    assert rounds.kind is StepKind.ENDS_ROUND
    rounds.voted(step_s=1e-3)  # dropped: no `after_step`
    assert rounds.kind is StepKind.ENDS_ROUND


def test_the_position_is_restored_and_the_next_step_votes() -> None:
    rounds = Rounds(every=5, wait=2, from_step=1)
    kinds(rounds, steps=7, step_s=1e-3)
    again = Rounds(every=5, wait=2, from_step=1)
    again.load_state(rounds.state())
    assert again.state() == rounds.state() == {"step": 7, "done": 1, "waits": 1}
    assert again.kind is StepKind.ENDS_ROUND
    again.end()
    assert (again.has_begun, again.kind) == (False, StepKind.VOTE)


@pytest.mark.parametrize("method", METHODS)
def test_a_table_is_read_back_as_the_same_schedule(method: str) -> None:
    schedule = parse_schedule({"method": method, "every": 7, "from_step": 3})
    assert schedule is not None
    assert parse_schedule(table_of(schedule)) == schedule
    assert parse_schedule(schedule) is schedule
    assert parse_schedule(None) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("local-sgd", "give a table such as"),
        ({"every": 3}, "the method None is unknown"),
        ({"method": "daso", "every": 3, "outer_lr": 1.0}, "no key outer_lr; valid here: method, every, wait"),
        ({"method": "diloco", "every": 3, "outer_lr": float("nan")}, "outer_lr is nan"),
        ({"method": "local-sgd", "every": True}, "every is True"),
        ({"method": "local-sgd", "every": 3, "from_step": -1}, "from_step is -1"),
        ({"method": "local-sgd", "every": 3, "wire": "auto"}, "wire is 'auto'"),
    ],
)
def test_what_is_no_schedule_is_refused(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_schedule(given)


def test_an_average_arrives_before_the_next_one_starts() -> None:
    assert Daso(every=3, wait=2).wait == 2
    with pytest.raises(UsageError, match="from 0 to below every = 3"):
        Daso(every=3, wait=3)
