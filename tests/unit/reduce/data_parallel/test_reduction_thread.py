"""The reduction thread: order, several under way at once, errors, time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.errors import CommunicationError
from hpctrain.reduce.data_parallel.reduction_thread import MAX_IN_BACKGROUND, ReductionPipeline

pytestmark = pytest.mark.timing

CPU = torch.device("cpu")


class Script:
    """Reductions that go as written: bucket -> what it yields before it ends."""

    def __init__(self, turns: dict[int, list[bool]]) -> None:
        self._turns = turns
        self.log: list[tuple[str, int]] = []

    def reduce(self, number: int) -> Iterator[bool]:
        self.log.append(("begin", number))
        for progressed in self._turns[number]:
            yield progressed
            self.log.append(("turn", number))
        self.log.append(("end", number))

    def numbers(self, what: str) -> list[int]:
        return [number for kind, number in self.log if kind == what]


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.lists(st.booleans(), max_size=6), max_size=8),
    max_in_flight=st.integers(1, 5),
    overlap=st.booleans(),
)
def test_all_are_reduced_and_begin_in_the_order_of_submission(
    turns: list[list[bool]], max_in_flight: int, overlap: bool
) -> None:
    script = Script(dict(enumerate(turns)))
    with closing(
        ReductionPipeline(script.reduce, device=CPU, max_in_flight=max_in_flight, overlap=overlap)
    ) as pipeline:
        for number in range(len(turns)):
            pipeline.submit(number)
        pipeline.wait()
        assert script.numbers("begin") == list(range(len(turns)))
        assert sorted(script.numbers("end")) == list(range(len(turns)))
        in_flight, most = 0, 0
        for kind, _ in script.log:
            in_flight += {"begin": 1, "end": -1, "turn": 0}[kind]
            most = max(most, in_flight)
        assert most <= max_in_flight


@pytest.mark.parametrize("overlap", [True, False])
def test_reductions_begin_before_anyone_waits_for_them_where_they_overlap(overlap: bool) -> None:
    began = threading.Event()

    def reduce(number: int) -> Iterator[bool]:
        began.set()
        yield True

    with closing(ReductionPipeline(reduce, device=CPU, overlap=overlap)) as pipeline:
        pipeline.submit(0)
        assert began.wait(300 if overlap else 0.05) == overlap
        pipeline.wait()
    assert began.is_set()


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.lists(st.booleans(), max_size=4), max_size=24),
    alone=st.sets(st.integers(0, 23)),
    rounds=st.integers(1, 2),
)
def test_what_runs_in_the_background_begins_in_submit_and_in_order(
    turns: list[list[bool]], alone: set[int], rounds: int
) -> None:
    """Up to the first bucket that does not run there, or to as many as may be in flight."""
    script = Script(dict(enumerate(turns)))
    with closing(
        ReductionPipeline(
            script.reduce, device=CPU, overlap=False, in_background=lambda number: number not in alone
        )
    ) as pipeline:
        for _ in range(rounds):
            script.log.clear()
            for number in range(len(turns)):
                pipeline.submit(number)
            first_alone = min((number for number in alone if number < len(turns)), default=len(turns))
            assert script.numbers("begin") == list(range(min(first_alone, MAX_IN_BACKGROUND)))
            pipeline.wait()
            assert script.numbers("begin") == list(range(len(turns)))
            assert sorted(script.numbers("end")) == list(range(len(turns)))


def test_a_reduction_that_waits_lets_the_others_get_on() -> None:
    """The first ends only after the second and third have: one at a time would never end."""
    ended: list[int] = []

    def reduce(number: int) -> Iterator[bool]:
        while number == 0 and len(ended) < 2:
            yield False
        ended.append(number)

    with closing(ReductionPipeline(reduce, device=CPU, max_in_flight=3)) as pipeline:
        for number in range(3):
            pipeline.submit(number)
        pipeline.wait()
    assert ended == [1, 2, 0]


def test_turns_go_round() -> None:
    script = Script({0: [True] * 3, 1: [True] * 3})
    started = threading.Event()

    def reduce(number: int) -> Iterator[bool]:
        started.wait(300)  # both are submitted before the first begins
        return script.reduce(number)

    with closing(ReductionPipeline(reduce, device=CPU)) as pipeline:
        pipeline.submit(0)
        pipeline.submit(1)
        started.set()
        pipeline.wait()
    turns = [number for kind, number in script.log if kind == "turn"]
    assert turns in ([0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1])  # the second may join one turn later


def test_a_bucket_submitted_while_others_wait_begins_at_once() -> None:
    second_began = threading.Event()

    def reduce(number: int) -> Iterator[bool]:
        if number == 1:
            second_began.set()
        while not second_began.is_set():
            yield False

    with closing(ReductionPipeline(reduce, device=CPU)) as pipeline:
        pipeline.submit(0)
        time.sleep(0.02)
        pipeline.submit(1)
        pipeline.wait()
    assert second_began.is_set()


@pytest.mark.parametrize(("overlap", "in_submit"), [(True, False), (False, False), (False, True)])
def test_an_error_is_raised_by_the_next_wait_and_ends_what_is_under_way(
    overlap: bool, in_submit: bool
) -> None:
    closed: list[int] = []

    def reduce(number: int) -> Iterator[bool]:
        if number == 1:
            if not in_submit:
                yield True
            raise CommunicationError("the link is gone")
        try:
            while True:
                yield False
        finally:
            closed.append(number)

    with closing(
        ReductionPipeline(
            reduce, device=CPU, max_in_flight=2, overlap=overlap, in_background=lambda number: in_submit
        )
    ) as pipeline:
        for number in range(3):
            pipeline.submit(number)
        with pytest.raises(CommunicationError, match="link is gone"):
            pipeline.wait()
        pipeline.submit(2)  # dropped: it would wait for ever
        with pytest.raises(CommunicationError, match="link is gone"):
            pipeline.wait()
    assert closed == [0]


def test_an_error_before_the_first_turn_is_raised_too() -> None:
    def reduce(number: int) -> Iterator[bool]:
        raise CommunicationError(f"no bucket {number}")

    with closing(ReductionPipeline(reduce, device=CPU)) as pipeline:
        pipeline.submit(5)
        with pytest.raises(CommunicationError, match="no bucket 5"):
            pipeline.wait()


def test_busy_time_is_that_in_which_something_was_under_way() -> None:
    def reduce(number: int) -> Iterator[bool]:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            yield False

    with closing(ReductionPipeline(reduce, device=CPU)) as pipeline:
        started = time.perf_counter()
        pipeline.submit(0)
        pipeline.submit(1)  # at the same time, so it is not counted twice
        time.sleep(0.02)  # as backward goes on
        in_flight = pipeline.wait()
        assert 0.05 <= in_flight.total_s <= time.perf_counter() - started
        assert 0.01 <= in_flight.hidden_s <= in_flight.total_s
        assert pipeline.wait() == (0.0, 0.0)


def test_close_does_not_wait_for_a_reduction_that_hangs() -> None:
    def reduce(number: int) -> Iterator[bool]:
        while True:
            yield False

    pipeline = ReductionPipeline(reduce, device=CPU)
    pipeline.submit(0)
    pipeline.close()
    assert not any(
        thread.name == "hpctrain-reduce" and thread is pipeline._thread for thread in threading.enumerate()
    )
