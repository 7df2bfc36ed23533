"""Who is named as slow, from made-up windows: the slow rank with its cause, and nobody in noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from hpctrain.stragglers import COLUMNS, Change, SlowCause, SlowRankLimits, SlowRanks, WindowTimes, lines_of
from hpctrain.topology import Topology

Numbers = NDArray[np.float64]
STEP_S = 0.050


def topology(num_ranks: int, *, ranks_per_node: int = 2) -> Topology:
    return Topology.from_node_names([f"node{rank // ranks_per_node}" for rank in range(num_ranks)])


def window(num_ranks: int, *, compute_s: float = 0.04, **columns: float | Iterable[float]) -> Numbers:
    """A healthy window; columns: other values, one for all ranks or one for each."""
    numbers = np.zeros((num_ranks, len(COLUMNS)))
    usual = {"input": 1e-4, "compute": compute_s, "other": 2e-4, "step": STEP_S, "samples": 8, "save": np.nan}
    for name, value in {**usual, **columns}.items():
        numbers[:, COLUMNS.index(name)] = value
    numbers[:, COLUMNS.index("exposed_sync")] = STEP_S - numbers[:, :3].sum(axis=1)
    return numbers


def with_slow(numbers: Numbers, *, ranks: Iterable[int], column: str, seconds: float) -> Numbers:
    numbers = numbers.copy()
    numbers[list(ranks), COLUMNS.index(column)] += seconds
    numbers[:, COLUMNS.index("step")] += seconds
    return numbers


def observed(watch: SlowRanks, windows: Iterable[Numbers]) -> list[tuple[int, Change]]:
    """(number of the window, change) for all that is reported."""
    return [(n, change) for n, numbers in enumerate(windows) for change in watch.observe(numbers)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 64])
@pytest.mark.parametrize(
    ("column", "cause"),
    [("input", SlowCause.INPUT), ("compute", SlowCause.COMPUTE), ("other", SlowCause.OTHER)],
)
def test_a_slow_rank_is_named_once_with_its_cause_and_once_when_it_ends(
    num_ranks: int, column: str, cause: SlowCause
) -> None:
    healthy = window(num_ranks)
    slow = with_slow(healthy, ranks=[1], column=column, seconds=0.03)
    changes = observed(SlowRanks(topology(num_ranks)), [healthy] * 20 + [slow] * 20 + [healthy] * 10)
    assert [(n, change.ended) for n, change in changes] == [
        (22, False),
        (42, True),
    ]  # the third window of each
    found = changes[0][1].slow
    assert (found.ranks, found.nodes, found.cause) == ((1,), ("node0",), cause)
    assert found.wait_s == pytest.approx(0.03, rel=0.01)
    assert found.value - found.usual == pytest.approx(0.03, rel=0.01)


def test_a_rank_that_is_slow_from_the_start_is_named_within_four_windows() -> None:
    """The fewer ranks there are, the less is known at first about how often windows stand out."""
    for num_ranks, expected in ((2, 3), (4, 3), (16, 2), (1024, 2)):
        slow = with_slow(window(num_ranks), ranks=[1], column="compute", seconds=0.03)
        assert [n for n, _ in observed(SlowRanks(topology(num_ranks)), [slow] * 9)] == [expected]


def test_what_lasts_for_fewer_windows_is_not_named() -> None:
    healthy = window(4)
    slow = with_slow(healthy, ranks=[1], column="compute", seconds=0.03)
    assert not observed(SlowRanks(topology(4)), ([slow] * 2 + [healthy]) * 10)


def test_what_is_better_for_fewer_windows_has_not_ended() -> None:
    healthy = window(4)
    slow = with_slow(healthy, ranks=[1], column="compute", seconds=0.03)
    changes = observed(SlowRanks(topology(4)), [slow] * 5 + ([healthy] * 2 + [slow]) * 10)
    assert [change.ended for _, change in changes] == [False]


def test_the_ranks_of_a_slow_node_are_named_together_and_end_together() -> None:
    healthy = window(8)
    slow = with_slow(healthy, ranks=[2, 3], column="compute", seconds=0.03)
    half = with_slow(healthy, ranks=[3], column="compute", seconds=0.03)
    changes = observed(SlowRanks(topology(8)), [healthy] * 9 + [slow] * 5 + [half] * 5 + [healthy] * 5)
    assert [(n, c.slow.ranks, c.ended) for n, c in changes] == [(11, (2, 3), False), (21, (2, 3), True)]


def test_a_slow_rank_whose_cause_changes_is_named_with_the_other_one() -> None:
    healthy = window(4)
    by_compute = with_slow(healthy, ranks=[1], column="compute", seconds=0.03)
    by_input = with_slow(healthy, ranks=[1], column="input", seconds=0.02)
    windows = (
        [healthy] * 9 + [by_compute] * 9 + [by_input] * 2 + [by_compute] + [by_input] * 9 + [healthy] * 5
    )
    changes = observed(SlowRanks(topology(4)), windows)
    assert [(n, c.slow.cause.value, c.ended) for n, c in changes] == [
        (11, "compute", False), (23, "compute", True), (23, "input", False), (32, "input", True)
    ]  # fmt: skip
    assert changes[2][1].slow.wait_s == pytest.approx(0.02)


def test_two_slow_ranks_of_different_nodes_and_causes_are_named_apart() -> None:
    slow = with_slow(window(16), ranks=[5], column="compute", seconds=0.03)
    slow = with_slow(slow, ranks=[9], column="input", seconds=0.02)
    changes = observed(SlowRanks(topology(16)), [slow] * 4)
    assert [(c.slow.ranks, c.slow.cause) for _, c in changes] == [
        ((5,), SlowCause.COMPUTE),
        ((9,), SlowCause.INPUT),
    ]


def test_a_difference_of_less_than_a_tenth_of_the_step_or_of_2_ms_is_not_named() -> None:
    assert not observed(
        SlowRanks(topology(4)), [with_slow(window(4), ranks=[1], column="compute", seconds=0.004)] * 9
    )
    short = window(4, compute_s=0.001, step=0.002)
    assert not observed(
        SlowRanks(topology(4)), [with_slow(short, ranks=[1], column="compute", seconds=0.0015)] * 9
    )
    assert observed(
        SlowRanks(topology(4), limits=SlowRankLimits(min_excess=0.05)),
        [with_slow(window(4), ranks=[1], column="compute", seconds=0.004)] * 9,
    )


def test_a_rank_with_more_samples_may_compute_longer_and_one_with_fewer_need_not_be_faster() -> None:
    uneven = window(3, samples=[8, 4, 4], compute=[0.08, 0.04, 0.04])
    assert not observed(SlowRanks(topology(3)), [uneven] * 9)
    fixed_cost = window(3, samples=[4, 8, 8])
    assert not observed(SlowRanks(topology(3)), [fixed_cost] * 9)
    slow = with_slow(uneven, ranks=[1], column="compute", seconds=0.03)
    assert [c.slow.ranks for _, c in observed(SlowRanks(topology(3)), [slow] * 9)] == [(1,)]


def test_where_every_rank_is_slower_nobody_is() -> None:
    assert not observed(SlowRanks(topology(4)), [window(4)] * 5 + [window(4, compute_s=0.4)] * 9)


def test_a_rank_whose_part_of_a_checkpoint_takes_longer_is_named_after_three_saves() -> None:
    saves = [2.0, 2.1, 9.0, 1.9]
    windows = [window(4), window(4, save=saves), window(4), window(4), *[window(4, save=saves)] * 2]
    changes = observed(SlowRanks(topology(4)), windows)
    assert [(n, c.slow.ranks, c.slow.cause) for n, c in changes] == [(5, (2,), SlowCause.CHECKPOINT)]
    assert changes[0][1].slow.value == 9.0
    assert not observed(SlowRanks(topology(4)), [window(4, save=[0.1, 0.1, 0.25, 0.1])] * 9)  # 0.15 s more


@pytest.mark.parametrize("num_ranks", [2, 4, 16, 256])
@pytest.mark.parametrize(
    "noise",
    [
        lambda random, n: random.normal(0, 0.01, n),
        lambda random, n: random.exponential(0.01, n),
        lambda random, n: 0.004 * random.standard_t(2, n),  # heavy tails
        lambda random, n: 0.03 * (random.random(n) < 0.1),  # hiccups
        lambda random, n: np.full(n, random.normal(0, 0.01)),  # all ranks alike
    ],
    ids=["normal", "exponential", "student", "hiccups", "common"],
)
def test_nobody_is_named_in_three_hours_of_noise(
    num_ranks: int, noise: Callable[[np.random.Generator, int], Numbers]
) -> None:
    """1080 windows of 10 s in which compute of 40 ms varies by 10 ms and more from window to window."""
    random = np.random.default_rng(num_ranks)
    watch = SlowRanks(topology(num_ranks))
    windows = (
        window(num_ranks, compute=np.maximum(0.001, 0.04 + noise(random, num_ranks))) for _ in range(1080)
    )
    assert not observed(watch, windows)


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.integers(2, 40),
    slow_rank=st.integers(0, 39),
    column=st.sampled_from(["input", "compute", "other"]),
    noise=st.floats(0.0, 0.004),
    factor=st.floats(0.6, 5.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_in_noise_the_slow_rank_is_named_and_nobody_else(
    num_ranks: int, slow_rank: int, column: str, noise: float, factor: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rank = slow_rank % num_ranks

    def noisy(slow: bool) -> Numbers:
        numbers = window(num_ranks, compute=np.maximum(1e-3, 0.04 + random.normal(0, noise, num_ranks)))
        if not slow:
            return numbers
        return with_slow(numbers, ranks=[rank], column=column, seconds=0.04 * factor)

    watch = SlowRanks(topology(num_ranks))
    changes = observed(watch, [noisy(slow) for slow in [False] * 6 + [True] * 20 + [False] * 20])
    assert [(c.slow.ranks, c.slow.cause.value, c.ended) for _, c in changes] == [
        ((rank,), column, False),
        ((rank,), column, True),
    ]


def test_the_lines_say_who_why_and_what_it_costs() -> None:
    slow = with_slow(window(8), ranks=[5], column="compute", seconds=0.03)
    (change,) = (c for _, c in observed(SlowRanks(topology(8)), [slow] * 5))
    assert lines_of([change, Change(change.slow, ended=True)], over="the last 600 steps") == [
        "rank 5 (node2) is slow (compute): 70 ms per step, the median of the ranks is 40 ms, over the last 600 steps; "
        "the others wait 30 ms per step for it",
        "rank 5 (node2) is no longer slow (compute)",
    ]
    many = lines_of([change] * 20, over="the last 600 steps")
    assert len(many) == 9
    assert many[-1] == "12 more of such changes are in the records only"


# ---------------------------------------------------------------------- what a rank measures


def lap(**seconds: float) -> dict[str, float]:
    parts = {
        "input": 0.0, "compute": 0.04, "exposed_sync": 0.009, "checkpoint": 0.0, "evaluation": 0.0, "other": 0.001,
        "step": 0.05,
    }  # fmt: skip
    return {**parts, **seconds}


def taken(times: WindowTimes) -> dict[str, float]:
    return dict(zip(COLUMNS, times.take().tolist(), strict=True))


def test_a_window_is_robust_against_hiccups_and_keeps_what_comes_every_tenth_step() -> None:
    times = WindowTimes()
    for number in range(200):
        hiccup = 30.0 if number == 77 else 0.0
        times.add(
            lap(
                compute=0.04 + hiccup,
                step=0.05 + hiccup + (number % 10 == 0) * 0.2,
                input=(number % 10 == 0) * 0.2,
            ),
            samples=8,
        )
    assert times.num_steps == 200
    found = taken(times)
    assert found["compute"] == pytest.approx(0.04)
    assert found["input"] == pytest.approx(0.02)
    assert found["other"] == pytest.approx(0.001)
    assert found["samples"] == 8
    assert np.isnan(found["save"])
    assert times.num_steps == 0


def test_a_window_of_one_step_and_with_saves() -> None:
    times = WindowTimes()
    times.add(lap(own_write=3.0, checkpoint=4.0, step=4.05), samples=3)
    found = taken(times)
    assert (found["samples"], found["save"]) == (3, 3.0)
    assert found["other"] == pytest.approx(0.001, abs=1e-6)  # the time of a save is not the rank's own work
    times.add(lap(own_write=1.0), samples=3)
    times.add(lap(own_write=2.0), samples=3)
    assert taken(times)["save"] == 1.5
