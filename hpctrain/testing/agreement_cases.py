"""Test cases, used by `collective_cases`, in which ranks must agree on values and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.comm import (
    World,
    agreed,
    all_gather_json,
    broadcast_json,
    check_same,
    is_true_everywhere,
    on_rank_0,
    raise_together,
)
from hpctrain.errors import (
    CheckpointError,
    CommunicationError,
    DataError,
    HpctrainError,
    LaunchError,
    RecipeError,
)


def raised_by(function: Callable[[], Any]) -> HpctrainError:
    try:
        function()
    except HpctrainError as error:
        return error
    raise AssertionError("nothing was raised")


def case_json_goes_to_all_ranks(world: World) -> None:
    value = {"rank": world.rank, "text": "é" * world.rank, "list": [None, 1.5]}
    expected = [{"rank": r, "text": "é" * r, "list": [None, 1.5]} for r in range(world.num_ranks)]
    assert all_gather_json(world, value) == expected
    for root in range(world.num_ranks):
        assert broadcast_json(world, value, root=root) == expected[root]


def case_one_rank_that_fails_makes_all_raise(world: World) -> None:
    last = world.num_ranks - 1

    def function() -> int:
        if world.rank == last:
            raise DataError("the shard is cut short")
        return 5

    error = raised_by(lambda: agreed(world, function))
    assert type(error) is DataError
    assert error.agreed
    assert "the shard is cut short" in str(error)
    if world.num_ranks > 1:
        assert f"rank {last} (" in str(error)
    assert agreed(world, lambda: world.rank) == world.rank


def case_equal_errors_are_folded_and_different_ones_named(world: World) -> None:
    error = raised_by(lambda: raise_together(world, RecipeError("lr must be above 0")))
    assert type(error) is RecipeError
    assert str(error) == "lr must be above 0"
    if world.num_ranks < 3:
        return
    mine: HpctrainError | None = DataError("no such file") if world.rank else None
    error = raised_by(lambda: raise_together(world, mine))
    assert type(error) is DataError
    assert str(error).startswith(f"ranks 1-{world.num_ranks - 1} (")
    assert str(error).count("no such file") == 1
    # The lowest failing rank decides on the class; the others' texts are kept.
    mine = {0: None, 1: CheckpointError("torn"), 2: DataError("missing")}.get(world.rank)
    error = raised_by(lambda: raise_together(world, mine))
    assert type(error) is CheckpointError
    assert "torn" in str(error)
    assert "missing" in str(error)
    raise_together(world, None)


def case_rank_0_acts_for_all(world: World) -> None:
    ran: list[int] = []

    def function() -> dict[str, int]:
        ran.append(world.rank)
        return {"answer": 42}

    assert on_rank_0(world, function) == {"answer": 42}
    assert ran == ([0] if world.rank == 0 else [])

    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/runs")

    error = raised_by(lambda: on_rank_0(world, refuse))
    assert type(error) is LaunchError
    assert "Permission denied" in str(error)
    assert error.agreed
    error = raised_by(lambda: agreed(world, refuse, os_error=CheckpointError))
    assert type(error) is CheckpointError


def case_a_value_that_differs_names_the_ranks_that_differ(world: World) -> None:
    check_same(world, name="the seed", value=[1, {"a": 2}])
    if world.num_ranks < 3:
        return
    value = 7 if world.rank == 1 else 3
    error = raised_by(lambda: check_same(world, name="the seed", value=value))
    assert isinstance(error, CommunicationError)
    assert "the seed must be the same" in str(error)
    assert "but rank 1 7" in str(error)


def case_a_vote_is_true_only_if_every_rank_says_so(world: World) -> None:
    assert is_true_everywhere(world, True)
    assert not is_true_everywhere(world, False)
    for rank in range(world.num_ranks):
        assert not is_true_everywhere(world, world.rank != rank)
