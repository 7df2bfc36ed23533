"""Ranks in one operation that have passed different arguments: when they are compared, and who is named."""

from __future__ import annotations

from hpctrain.comm.watchdog.board.rank_status import (
    ComparisonSchedule,
    GroupPosition,
    RankPosition,
    find_mismatch,
)
from tests.unit.comm.watchdog.rank_alone import FOUR, SEVEN, position


def different(*positions: RankPosition, decided: tuple[str, ...] = ()) -> str | None:
    found = find_mismatch({position.rank: position for position in positions}, decided=decided)
    return None if found is None else found.text


def test_the_rank_with_another_buffer_is_the_one_that_differs_from_most() -> None:
    told = different(position(0, signature=FOUR), position(1, signature=SEVEN), position(2, signature=FOUR))
    assert told == (
        f"ranks called number 3 of world with different arguments: rank 1 on h1 has {SEVEN}, where 2 of 3 have {FOUR}"
    )
    told = different(position(0, signature=SEVEN), position(1, signature=FOUR), position(2, signature=FOUR))
    assert told is not None
    assert f"rank 0 on h0 has {SEVEN}, where 2 of 3 have {FOUR}" in told


def test_of_two_ranks_none_is_blamed_while_a_third_may_come() -> None:
    pair = (position(0, signature=SEVEN), position(1, signature=FOUR))
    assert different(*pair) is None
    told = different(*pair, position(2, signature=FOUR))
    assert told is not None
    assert f"rank 0 on h0 has {SEVEN}, where 2 of 3 have {FOUR}" in told
    assert different(*pair, decided=("split 1",)) is None
    told = different(*pair, decided=("world",))
    assert told is not None
    assert f"rank 1 on h1 has {FOUR}, where 1 of 2 have {SEVEN}" in told


def test_of_a_group_of_two_no_third_rank_can_come() -> None:
    def of_two(rank: int, signature: str) -> RankPosition:
        place = GroupPosition(
            sequence=3, operation="all_reduce", waiting_s=2.5, signature=signature, num_ranks=2
        )
        return RankPosition(rank=rank, host=f"h{rank}", pid=1, written=0.0, groups={"split 1": place})

    told = different(of_two(0, SEVEN), of_two(5, FOUR))
    assert told is not None
    assert f"rank 5 on h5 has {FOUR}, where 1 of 2 have {SEVEN}" in told


def test_ranks_elsewhere_are_not_compared() -> None:
    here = position(0, signature=FOUR)
    elsewhere = [
        position(1, signature=SEVEN, sequence=2), position(2, signature=SEVEN, waits=False), position(3),
    ]  # fmt: skip
    assert different(here, *elsewhere, decided=("world",)) is None


def waiting(**groups: tuple[int, float]) -> RankPosition:
    """In these operations, by communicator: number and seconds."""
    places = {
        name: GroupPosition(sequence=sequence, operation="all_reduce", waiting_s=waiting_s, signature=FOUR)
        for name, (sequence, waiting_s) in groups.items()
    }
    return RankPosition(rank=0, host="h0", pid=1, written=0.0, groups=places)


def test_each_operation_is_compared_three_times_and_slow_ones_later() -> None:
    schedule = ComparisonSchedule(600.0)
    assert schedule.due([waiting(world=(5, 1.9))]) == {}
    assert schedule.due([waiting(world=(5, 2.1)), waiting(world=(5, 1.0))]) == {"world": 2}
    assert schedule.due([waiting(world=(5, 2.9))]) == {}
    # However long some of the ranks have waited when they are first looked at.
    assert schedule.due([waiting(world=(5, 30.0), split=(1, 30.0)), waiting(world=(5, 29.0))]) == {
        "world": 1, "split": 2,
    }  # fmt: skip
    assert schedule.due([waiting(world=(5, 31.0))]) == {"world": 0}
    assert schedule.due([waiting(world=(5, 90.0))]) == {}
    assert schedule.due([waiting(world=(6, 3.9))]) == {}  # number 5 was only slow, and so may this be
    assert schedule.due([waiting(world=(6, 4.1))]) == {"world": 2}
