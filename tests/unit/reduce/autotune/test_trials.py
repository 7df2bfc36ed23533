"""Trials over threads, with reducers whose cost is known and a clock that only they move."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import CommunicationError, UsageError
from hpctrain.reduce.autotune.decision import Choice
from hpctrain.reduce.autotune.link_speed import Candidate, LinkFloor
from hpctrain.reduce.autotune.trials import MAX_ROUNDS_COMPARED, ROUNDS_OF_ALL, Calibration, calibrate
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, StateTensor
from tests.unit.reduce.autotune.real_reducers import CANDIDATES, CPU, NODES, make_real

CostOf = Callable[[int, int], float]  # rank, bytes -> seconds


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._lock = threading.Lock()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


class FakeReducer:
    """Takes as long as it is told, and writes down what is asked of it."""

    def __init__(
        self, world: World, *, cost: CostOf, clock: FakeClock, room_bytes: int | None = None
    ) -> None:
        self._world = world
        self._cost = cost
        self._clock = clock
        self._room_bytes = room_bytes
        self._sizes: list[int] = []
        self.largest = 0
        self.reduced: Counter[int] = Counter()  # by size
        self.closed = False

    algorithm = "fake"
    wire = "fp32"

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        self._sizes = [bucket.numel * 4 for bucket in buckets]
        self.largest = max([self.largest, *self._sizes])
        if self._room_bytes is not None and self.largest > self._room_bytes and self._world.rank == 1:
            raise CommunicationError("no shared memory left")
        return [torch.zeros(bucket.numel) for bucket in buckets]

    def reduce(self, number: int) -> Iterator[bool]:
        self.reduced[self._sizes[number]] += 1
        self._clock.advance(self._cost(self._world.rank, self._sizes[number]))
        yield True

    def end_step(self, *, applied: bool, rescale: float) -> None: ...

    def bytes_sent(self) -> int:
        return 0

    def state(self) -> list[StateTensor]:
        return []

    def rows_to_load(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[range]]:
        return {}

    def load_state(
        self, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None: ...

    def close(self) -> None:
        self.closed = True


def link(latency_s: float, per_byte_s: float) -> CostOf:
    return lambda rank, num_bytes: latency_s + num_bytes * per_byte_s


def run(
    costs: dict[str, CostOf],
    *,
    num_ranks: int = 3,
    room: dict[str, int] | None = None,
    floor: LinkFloor | None = None,
) -> tuple[list[Calibration], list[list[FakeReducer]], list[float]]:
    """Calibrate over `costs` by name: what each rank found, its reducers, and its clock at the end."""

    def on_rank(world: World) -> tuple[Calibration, list[FakeReducer], float]:
        clock = FakeClock()
        made: list[FakeReducer] = []

        def make(algorithm: str, wire: str) -> BucketReducer:
            if algorithm == "impossible":
                raise UsageError("not here", agreed=True)
            room_bytes = (room or {}).get(algorithm)
            made.append(FakeReducer(world, cost=costs[algorithm], clock=clock, room_bytes=room_bytes))
            return made[-1]

        candidates = [Candidate(name, "fp32") for name in costs]
        found = calibrate(
            world, make=make, candidates=candidates, device=CPU, floor=floor, clock=clock,
        )  # fmt: skip
        return found, made, clock.now_s

    results = run_threads(num_ranks, on_rank)
    return [r[0] for r in results], [r[1] for r in results], [r[2] for r in results]


def test_every_rank_finds_the_same_and_the_slowest_rank_counts() -> None:
    found, made, _ = run({
        "uneven": lambda rank, num_bytes: (1e-3 if rank == 1 else 1e-6) + num_bytes * 2e-9,
        "even": link(1e-4, 1e-9),
    })  # fmt: skip
    assert found[0] == found[1] == found[2]
    choice = Choice.of_measurements(found[0].measurements)
    assert {choice.fastest([1 << size]) for size in range(27)} == {Candidate("even", "fp32")}
    assert choice.costs[Candidate("uneven", "fp32")].at(1 << 12) == pytest.approx(1e-3, rel=0.01)
    assert all(reducer.closed for reducers in made for reducer in reducers)


def test_known_costs_are_found_again_and_the_crossover_between_them() -> None:
    found, _, _ = run({"quick": link(1e-5, 4e-9), "wide": link(2e-4, 2e-9)})
    choice = Choice.of_measurements(found[0].measurements)
    assert choice.fastest([1 << 15]) == Candidate("quick", "fp32")
    assert choice.fastest([1 << 20]) == Candidate("wide", "fp32")
    assert choice.seconds([1 << 26]) == pytest.approx(2e-4 + (1 << 26) * 2e-9, rel=1e-3)


def test_what_is_clearly_slower_is_not_measured_at_larger_sizes() -> None:
    _, made, _ = run({"good": link(1e-5, 1e-9), "also": link(1.5e-5, 1.2e-9), "sleeps": link(5e-3, 4e-9)})
    assert [reducer.largest for reducer in made[0]] == [1 << 24, 1 << 24, 1 << 18]
    _, made, _ = run({f"a{n}": link(1e-5, 1e-9 * (1 + n / 10)) for n in range(6)})
    assert [reducer.largest for reducer in made[0]] == [1 << 24] * 4 + [1 << 21] * 2


def test_what_is_nearly_as_fast_as_the_best_is_tried_more_often_where_bytes_are_compared() -> None:
    costs = {"best": link(1e-3, 1e-8), "near": link(1e-3, 1.3e-8), "slow": link(1e-3, 3e-8)}
    _, made, _ = run(costs)
    small, compared = zip(*((one.reduced[1 << 15], one.reduced[1 << 18]) for one in made[0]), strict=True)
    assert len(set(small)) == 1
    assert compared == (MAX_ROUNDS_COMPARED, MAX_ROUNDS_COMPARED, ROUNDS_OF_ALL)


def test_where_bytes_decide_what_sends_clearly_more_is_not_measured_whatever_its_trials_say() -> None:
    floor = LinkFloor(num_ranks=8, num_nodes=4, ranks_per_node=2, bytes_per_s=1e9)
    costs = {"hierarchical": link(1e-4, 2e-9), "direct": link(1e-4, 1e-9)}
    _, made, _ = run(costs, floor=floor)
    assert [reducer.largest for reducer in made[0]] == [1 << 24, 1 << 15]  # 1.5 ns per byte: 0.1 ms are 67 KB
    _, made, _ = run(costs)
    assert [reducer.largest for reducer in made[0]] == [1 << 24, 1 << 24]


@pytest.mark.parametrize(
    ("latency_s", "per_byte_s"),
    [(3e-5, 2e-10), (3e-4, 1.2e-8), (1e-3, 6e-8), (1e-2, 1e-6), (0.1, 1e-7)],
    ids=["one node", "1 Gbit/s", "200 Mbit/s", "10 Mbit/s", "100 ms away"],
)
def test_the_time_is_kept_on_any_link(latency_s: float, per_byte_s: float) -> None:
    costs = {f"a{n}": link(latency_s, per_byte_s * (1 + n / 10)) for n in range(8)}
    found, _, clocks = run(costs, num_ranks=2)
    assert max(clocks) < 2.0
    assert found[0].seconds == max(clocks)
    assert {m.algorithm for m in found[0].measurements} == set(costs)


def test_on_200_mbit_per_s_megabytes_are_still_measured() -> None:
    costs = {f"a{n}": link(1e-3, 3.5e-8 * (1 + n / 10)) for n in range(7)}
    found, _, _ = run(costs, num_ranks=2)
    assert max(m.num_bytes for m in found[0].measurements) >= 1 << 21


def test_what_begins_slowly_and_sends_fast_is_followed_to_large_sizes() -> None:
    found, _, _ = run({"quick": link(1e-5, 1e-9), "wide": link(2e-3, 5e-10)})
    choice = Choice.of_measurements(found[0].measurements)
    assert choice.fastest([1 << 20]) == Candidate("quick", "fp32")
    assert choice.fastest([1 << 24]) == Candidate("wide", "fp32")


def test_where_time_is_short_few_are_followed_to_large_sizes_rather_than_all_to_small_ones() -> None:
    costs = {f"a{n}": link(1e-3, 6e-8 * (2 - n / 10)) for n in range(16)}
    found, _, _ = run(costs, num_ranks=2)
    large = {m.algorithm for m in found[0].measurements if m.num_bytes >= 1 << 21}
    assert {"a15", "a14", "a13", "a12"} <= large
    assert len(large) < len(costs)


def test_more_candidates_than_the_time_allows_are_named() -> None:
    found, _, clocks = run({f"a{n}": link(0.4, 0) for n in range(5)}, num_ranks=2)
    assert max(clocks) < 2.5
    assert {m.algorithm for m in found[1].measurements} < {f"a{n}" for n in range(5)}
    assert "the time was used up" in found[1].notes[0]


def test_one_is_measured_even_where_making_them_takes_all_the_time() -> None:
    def on_rank(world: World) -> tuple[set[str], tuple[str, ...]]:
        make = make_real(world, NODES, made=[])
        found = calibrate(world, make=make, candidates=CANDIDATES, device=CPU, budget_s=0.0)
        return {one.algorithm for one in found.measurements}, found.notes

    for measured, notes in run_threads(3, on_rank):
        assert measured == {"flat"}
        assert notes == ("not measured: direct with fp32: the time was used up before",)


def test_what_cannot_be_made_is_named_and_the_others_are_measured() -> None:
    found, _, _ = run({"impossible": link(0, 0), "possible": link(1e-4, 1e-9)})
    assert {m.algorithm for m in found[0].measurements} == {"possible"}
    assert found[0].notes == ("not measured: impossible with fp32: not here",)


def test_nothing_that_can_be_made_is_an_error() -> None:
    with pytest.raises(UsageError, match="none of the reductions"):
        run({"impossible": link(0, 0)})


def test_sizes_end_where_one_node_has_no_memory_for_them() -> None:
    costs = {"a": link(1e-5, 1e-9), "b": link(1e-5, 1.1e-9)}
    found, _, _ = run(costs, room={"b": 1 << 19})
    for one in found:
        assert {(m.algorithm, m.num_bytes) for m in one.measurements} == {
            (name, size) for name in "ab" for size in (1 << 12, 1 << 15, 1 << 18)
        }
        assert "b found no memory" in one.notes[0]
