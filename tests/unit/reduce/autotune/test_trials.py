"""Calibration over threads, with reducers whose cost is known and a clock that only they move."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import BufferMismatch, CheckpointError, CommunicationError, UsageError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.autotune.cost_model import Candidate, Measurement
from hpctrain.reduce.autotune.decision import Choice
from hpctrain.reduce.autotune.link_bound import LinkFloor
from hpctrain.reduce.autotune.trials import MAX_ROUNDS_COMPARED, ROUNDS_OF_ALL, Calibration, calibrate
from hpctrain.reduce.autotune.tune import (
    AutoChoice,
    CalibrationFiles,
    TrialResults,
    bucket_sizes,
    find_choice,
)
from hpctrain.reduce.autotune.tuned_reducer import AutoReducer
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, Slot, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, StateTensor
from hpctrain.reduce.contract.polling import run_to_end
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.shared_memory.engine_reducer import EngineReducer
from hpctrain.topology import Topology

CPU = torch.device("cpu")
CostOf = Callable[[int, int], float]  # rank, bytes -> seconds


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TickingClock:
    """One millisecond passes between two readings, however long the machine takes."""

    def __init__(self) -> None:
        self._readings = 0

    def __call__(self) -> float:
        self._readings += 1
        return self._readings * 1e-3


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
        self._clock.now_s += self._cost(self._world.rank, self._sizes[number])
        yield True

    def settle(self, *, applied: bool, rescale: float) -> None: ...

    def bytes_sent(self) -> int:
        return 0

    def state(self) -> list[StateTensor]:
        return []

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None: ...

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
        found = calibrate(world, make=make, candidates=candidates, device=CPU, floor=floor, clock=clock)
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
    assert choice.candidates == (Candidate("even", "fp32"),)
    assert choice.costs[Candidate("uneven", "fp32")].at(1 << 12) == pytest.approx(1e-3, rel=0.01)
    assert all(reducer.closed for reducers in made for reducer in reducers)


def test_known_costs_are_found_again_and_the_crossover_between_them() -> None:
    found, _, _ = run({"quick": link(1e-5, 4e-9), "wide": link(2e-4, 2e-9)})
    choice = Choice.of_measurements(found[0].measurements)
    assert choice.choose(1 << 15) == Candidate("quick", "fp32")
    assert choice.choose(1 << 20) == Candidate("wide", "fp32")
    assert choice.seconds(1 << 26) == pytest.approx(2e-4 + (1 << 26) * 2e-9, rel=1e-3)


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
    assert [reducer.largest for reducer in made[0]] == [1 << 24, 1 << 15]  # 1.5 ns a byte: 0.1 ms are 67 KB
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
    assert choice.choose(1 << 20) == Candidate("quick", "fp32")
    assert choice.choose(1 << 24) == Candidate("wide", "fp32")


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


# ---------------------------------------------------------------------- the file

NODES = Topology.from_node_names(["a", "a", "b"])
CANDIDATES = (Candidate("flat", "fp32"), Candidate("direct", "fp32"))


def make_real(world: World, topology: Topology, *, made: list[str]) -> Callable[[str, str], BucketReducer]:
    from hpctrain.reduce.codecs.registry import codec_named

    def make(algorithm: str, wire: str) -> BucketReducer:
        made.append(algorithm)
        comm = world.duplicate()
        if algorithm == "flat":
            return CollectiveReducer.flat(comm, topology=topology, wire=wire)
        return CollectiveReducer.direct(comm, topology=topology, codec=codec_named(wire))

    return make


def find(
    files: CalibrationFiles, *, topology: Topology = NODES, versions: dict[str, str] | None = None
) -> tuple[TrialResults, list[str], list[str]]:
    """`find_choice` on threads: what all ranks found, which reducers were made, and rank 0's notes."""

    def on_rank(world: World) -> tuple[TrialResults, list[str], list[str]]:
        made: list[str] = []
        notes: list[str] = []
        found = find_choice(
            world, make=make_real(world, topology, made=made), candidates=CANDIDATES, topology=topology,
            device=CPU, files=files, versions=versions or {"hpctrain": "1"}, note=notes.append, budget_s=0.2,
            clock=TickingClock(),
        )  # fmt: skip
        return found, made, notes

    results = run_threads(topology.num_ranks, on_rank)
    assert all(result == results[0] for result in results)
    return results[0]


def test_a_second_start_takes_the_numbers_of_the_first(tmp_path: Path) -> None:
    files = CalibrationFiles(run=tmp_path / "reduction.json")
    first, made, notes = find(files)
    assert sorted(made) == ["direct", "flat"]
    assert notes == []
    assert first.source.startswith("measured in ")
    assert {level.axis for level in first.levels} == {"local", "node"}
    second, made, notes = find(files)
    assert made == []
    assert notes == []
    assert second.source == f"from {tmp_path / 'reduction.json'}"
    assert second.choice == first.choice
    assert second.levels == first.levels


def test_other_ranks_or_versions_measure_anew_and_keep_what_was_there(tmp_path: Path) -> None:
    files = CalibrationFiles(run=tmp_path / "reduction.json")
    first, _, _ = find(files)
    for options, name in (
        ({"topology": Topology.from_node_names(["a", "b"])}, "ranks by node"),
        ({"versions": {"hpctrain": "2"}}, "versions"),
    ):
        _, made, notes = find(files, **options)
        assert sorted(made) == ["direct", "flat"]
        assert len(notes) == 1
        assert f"measurements of other {name}" in notes[0]
    assert len(json.loads((tmp_path / "reduction.json").read_text())["entries"]) == 3
    again, made, _ = find(files)
    assert made == []
    assert again.choice == first.choice


def _without(path: Path, *names: str) -> None:
    content = json.loads(path.read_text())
    place: Any = content
    for name in names[:-1]:
        place = place[int(name)] if name.isdigit() else place[name]
    del place[names[-1]]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:100]),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("[]"),
        lambda path: _without(path, "schema"),
        lambda path: _without(path, "entries", "0", "found"),
        lambda path: _without(path, "entries", "0", "found", "levels"),
        lambda path: path.write_text(path.read_text().replace('"seconds": 0', '"seconds": -1')),
        lambda path: path.write_text(path.read_text().replace('"algorithm": "flat"', '"algorithm": "x"')),
    ],
)
def test_a_damaged_file_is_measured_anew_and_replaced(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = tmp_path / "reduction.json"
    files = CalibrationFiles(run=path)
    find(files)
    damage(path)
    _, made, notes = find(files)
    assert sorted(made) == ["direct", "flat"]
    assert len(notes) == 1
    assert f"{path} cannot be read" in notes[0]
    assert find(files)[1:] == ([], [])


def test_a_file_that_runs_share_is_copied_into_the_run(tmp_path: Path) -> None:
    shared = tmp_path / "cluster.json"
    find(CalibrationFiles(shared=shared, run=tmp_path / "one" / "reduction.json"))
    files = CalibrationFiles(shared=shared, run=tmp_path / "two" / "reduction.json")
    second, made, _ = find(files)
    assert made == []
    assert second.source == f"from {shared}"
    shared.unlink()
    third, made, _ = find(files)
    assert made == []
    assert third.choice == second.choice


def test_a_file_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no folder")
    found, made, notes = find(CalibrationFiles(run=tmp_path / "taken" / "reduction.json"))
    assert made
    assert found.choice.costs
    assert any("cannot be written" in note for note in notes)


def test_one_rank_or_one_candidate_measures_nothing() -> None:
    def on_rank(world: World) -> TrialResults:
        def make(algorithm: str, wire: str) -> BucketReducer:
            raise AssertionError("a reducer was made")

        candidates = CANDIDATES if world.num_ranks == 1 else CANDIDATES[1:]
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        return find_choice(world, make=make, candidates=candidates, topology=topology, device=CPU)

    alone = run_threads(1, on_rank)[0]
    assert alone.source == "not measured: one rank"
    assert alone.choice.choose(1000) == CANDIDATES[0]
    together = run_threads(2, on_rank)[0]
    assert together.source == "not measured: no other algorithm is available"
    assert together.settle(gradient_bytes=10**9).choice.choose(1000) == CANDIDATES[1]


# ---------------------------------------------------------------------- the reducer


def by_size(*, wires: Sequence[str] = ("fp32",)) -> TrialResults:
    """flat below 10 KB, direct above."""
    measurements = [
        Measurement(algorithm=name, wire=wire, num_bytes=n, seconds=(latency_s + n * per_byte_s) * factor)
        for wire, factor in zip(wires, (1.0, 0.6), strict=False)
        for name, latency_s, per_byte_s in (("flat", 1e-5, 2e-9), ("direct", 2e-5, 1e-9))
        for n in (1 << 12, 1 << 18)
    ]
    return TrialResults(choice=Choice.of_measurements(measurements), source="told")


def test_the_faster_wire_is_settled_before_anything_is_made() -> None:
    auto = by_size(wires=("fp32", "fp16")).settle(gradient_bytes=100_000)
    assert auto.wire == "fp16"
    assert {candidate.wire for candidate in auto.choice.candidates} == {"fp16"}
    assert by_size().settle(gradient_bytes=100_000, bucket_bytes=777).bucket_bytes == 777


def test_a_wire_that_remembers_has_one_algorithm_for_all_sizes() -> None:
    auto = by_size(wires=("int8",)).settle(gradient_bytes=10**6)
    assert auto.wire == "int8"
    assert [r.candidate for r in auto.choice.ranges] == [Candidate("direct", "int8")]
    assert len(auto.record()["candidates"]) == 2


def test_buckets_for_a_prediction_hold_all_gradients() -> None:
    assert bucket_sizes(10, bucket_bytes=4) == [4, 4, 2]
    assert bucket_sizes(8, bucket_bytes=4) == [4, 4]
    assert bucket_sizes(0, bucket_bytes=4) == [0]


def test_each_bucket_goes_to_the_reducer_of_its_size_and_sums_right() -> None:
    auto = by_size().settle(gradient_bytes=10**6)
    assert auto.describe() == "auto: flat up to 10 KB, then direct"
    numels = (100, 50_000, 7, 20_000)
    buckets = plan_buckets([GradientSpec(n, torch.float32) for n in numels], bucket_bytes=1)
    used: list[list[str]] = []
    lock = threading.Lock()

    def on_rank(world: World) -> None:
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        made: list[str] = []
        reducer = AutoReducer(auto, comm=world.duplicate(), make=make_real(world, topology, made=made))
        for chosen in (buckets, buckets[:1], buckets[::-1]):
            memory = reducer.plan(chosen, device=CPU)
            for number, bucket in enumerate(chosen):
                assert memory[number].numel() == bucket.numel
                memory[number].fill_(float(world.rank + number))
                for _ in reducer.reduce(number):
                    pass
            for number in range(len(chosen)):
                expected = sum(rank + number for rank in range(world.num_ranks))
                assert torch.equal(memory[number], torch.full_like(memory[number], expected))
        reducer.settle(applied=True, rescale=1.0)
        with pytest.raises(UsageError, match="no bucket 4"):
            reducer.reduce(4)
        assert reducer.wire == "fp32"
        assert reducer.state() == []
        reducer.close()
        with lock:
            used.append(made)

    run_threads(3, on_rank)
    assert used == [["flat", "direct"]] * 3 or used == [["direct", "flat"]] * 3


def test_what_is_filled_is_told_to_its_buckets_reducer_and_only_one_that_has_all_multiplies() -> None:
    """Reducers that know nothing of it are not told."""
    auto = by_size().settle(gradient_bytes=10**6)
    buckets = plan_buckets(
        [GradientSpec(n, torch.float32) for n in (70_000, 100, 50_000, 7, 20_000)], bucket_bytes=1
    )

    def on_rank(world: World) -> None:
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        made = make_real(world, topology, made=[])
        nodes = ReducerMaker(world, topology=topology)
        told: list[tuple[int, int]] = []

        def make(algorithm: str, wire: str) -> BucketReducer:
            if algorithm == "flat":
                return made(algorithm, wire)
            reducer = nodes.make(Algorithm.HIERARCHICAL, wire=wire)
            assert isinstance(reducer, EngineReducer)
            reducer.filled = lambda number, num_elems: told.append((number, num_elems))  # type: ignore[method-assign]
            return reducer

        reducer = AutoReducer(auto, comm=world.duplicate(), make=make)
        reducer.plan(buckets, device=CPU)
        sizes = [bucket.numel for bucket in buckets]
        for number, size in enumerate(sizes):
            reducer.filled(number, size)
        large = [size for size in sizes if size > 10_000]
        assert len(large) == 3
        assert told == list(enumerate(large))
        # What one of two reducers cannot do, neither does; alone it does, and the next plan begins anew.
        for chosen, multiplied in ((buckets, False), (buckets[:1], True), (buckets, False)):
            buffers = reducer.plan(chosen, device=CPU)
            assert reducer.begin_step(0.25) == (0.25 if multiplied else 1.0)
            for number, buffer in enumerate(buffers):
                buffer.fill_(2.0)
                run_to_end([reducer.reduce(number)])
                assert buffer.eq(1.0 if multiplied else 4.0).all()
        reducer.close()

    run_threads(2, on_rank)


def updater_with(
    world: World, auto: AutoChoice, *, made: list[str]
) -> tuple[torch.nn.Module, AllReduceUpdater]:
    topology = Topology.from_node_names(["a"] * world.num_ranks)
    reducer = AutoReducer(auto, comm=world.duplicate(), make=make_real(world, topology, made=made))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 200), torch.nn.Linear(200, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, AllReduceUpdater(optimizer, comm=world, reducer=reducer, bucket_bytes=auto.bucket_bytes)


def train(world: World, model: torch.nn.Module, updater: AllReduceUpdater, *, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(100 * step + world.rank))
        updater.backward(model(x).square().mean(), weight=1 / world.num_ranks)
        updater.step()


def test_a_resumed_run_reduces_as_the_one_that_saved_whatever_it_would_choose_itself() -> None:
    key = {"ranks": 5}
    first = replace(by_size(), key=key).settle(gradient_bytes=30_000)
    measured = [
        replace(m, seconds=m.seconds * (1 if m.algorithm == "flat" else 100))
        for m in by_size().choice.measurements
    ]
    own = TrialResults(choice=Choice.of_measurements(measured), source="told", key=key)
    second = replace(own.settle(gradient_bytes=30_000), bucket_bytes=1_000)
    assert second.choice.candidates != first.choice.candidates

    def on_rank(world: World) -> tuple[bool, list[str], str, int]:
        model, updater = updater_with(world, first, made=[])
        train(world, model, updater, steps=range(2))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        saved = json.loads(json.dumps(updater.state()))
        num_buckets = len(updater.buckets)
        train(world, model, updater, steps=range(2, 4))
        updater.close()
        made: list[str] = []
        resumed, its_updater = updater_with(world, second, made=made)
        resumed.load_state_dict(weights)
        its_updater.load_state(saved)
        assert len(its_updater.buckets) == num_buckets
        train(world, resumed, its_updater, steps=range(2, 4))
        its_updater.close()
        pairs = zip(model.parameters(), resumed.parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        return same, made, its_updater.state()["reduction"]["ranges"][-1]["algorithm"], num_buckets

    for same, made, algorithm, _ in run_threads(5, on_rank):
        assert same
        assert made == ["flat", "direct"]
        assert algorithm == "direct"


def test_a_choice_for_other_ranks_or_another_wire_is_not_taken_over() -> None:
    first = replace(by_size(), key={"ranks": 5}).settle(gradient_bytes=30_000)
    for other in (
        replace(by_size(), key={"ranks": 4}),
        replace(by_size(wires=("fp16",)), key={"ranks": 5}),
        replace(by_size(), key=None),
    ):
        own = other.settle(gradient_bytes=30_000)
        assert own.recalled(first.state()) is own
    with pytest.raises(CheckpointError, match="damaged"):
        first.recalled({"key": {"ranks": 5}, "ranges": "?", "bucket_bytes": 3})


def test_where_libraries_differ_between_nodes_all_ranks_decide_as_rank_0() -> None:
    def on_rank(world: World) -> TrialResults:
        return find_choice(
            world, make=make_real(world, NODES, made=[]), candidates=CANDIDATES, topology=NODES, device=CPU,
            versions={"mpi": f"of node {NODES.node_of(world.rank)}"}, budget_s=0.1,
        )  # fmt: skip

    ranks = run_threads(3, on_rank)
    assert ranks[0].key is not None
    assert ranks[0].key["versions"] == {"mpi": "of node 0"}
    own = [rank.settle(gradient_bytes=30_000) for rank in ranks]
    for node, source in enumerate(("from the checkpoint", own[0].source)):
        saved = {**own[0].state(), "key": {**ranks[0].key, "versions": {"mpi": f"of node {node}"}}}
        assert {one.recalled(json.loads(json.dumps(saved))).source for one in own} == {source}


def test_a_bucket_size_that_was_asked_for_stays_after_resume() -> None:
    measured = replace(by_size(), key={"ranks": 5})
    saved = measured.settle(gradient_bytes=30_000).state()
    assert measured.settle(gradient_bytes=1, bucket_bytes=77).recalled(saved).bucket_bytes == 77
    assert measured.settle(gradient_bytes=10**9).recalled(saved).bucket_bytes == saved["bucket_bytes"]


def test_ranks_with_other_buckets_are_told_before_they_part() -> None:
    auto = by_size().settle(gradient_bytes=10**6)

    def on_rank(world: World) -> None:
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        reducer = AutoReducer(auto, comm=world.duplicate(), make=make_real(world, topology, made=[]))
        numel = 100 if world.rank == 0 else 100_000
        bucket = Bucket(torch.float32, (Slot(0, 0, numel - 1, numel - 1),), numel)
        reducer.plan([bucket], device=CPU)

    with pytest.raises(BufferMismatch, match="rank 0"):
        run_threads(3, on_rank)
