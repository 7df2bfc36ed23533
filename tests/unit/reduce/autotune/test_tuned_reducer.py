"""The reducer that follows the measurements: choice by size, updater, resuming."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import BufferMismatch, CheckpointError, UsageError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.autotune.decision import Choice
from hpctrain.reduce.autotune.link_speed import Candidate, Measurement
from hpctrain.reduce.autotune.tune import (
    AutoChoice,
    TrialResults,
    bucket_sizes,
    find_choice,
)
from hpctrain.reduce.autotune.tuned_reducer import AutoReducer
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, Slot, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, run_to_end
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.shared_memory.engine_reducer import EngineReducer
from hpctrain.topology import Topology
from tests.unit.reduce.autotune.real_reducers import CANDIDATES, CPU, NODES, make_real


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


def test_what_is_filled_is_reported_to_its_buckets_reducer_and_only_one_that_has_all_multiplies() -> None:
    """Reducers that know nothing of it are not told."""
    auto = by_size().settle(gradient_bytes=10**6)
    buckets = plan_buckets(
        [GradientSpec(n, torch.float32) for n in (70_000, 100, 50_000, 7, 20_000)], bucket_bytes=1
    )

    def on_rank(world: World) -> None:
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        made = make_real(world, topology, made=[])
        nodes = ReducerMaker(world, topology=topology)
        reported: list[tuple[int, int]] = []

        def make(algorithm: str, wire: str) -> BucketReducer:
            if algorithm == "flat":
                return made(algorithm, wire)
            reducer = nodes.make(Algorithm.HIERARCHICAL, wire=wire)
            assert isinstance(reducer, EngineReducer)
            reducer.filled = lambda number, num_elems: reported.append((number, num_elems))  # type: ignore[method-assign]
            return reducer

        reducer = AutoReducer(auto, comm=world.duplicate(), make=make)
        reducer.plan(buckets, device=CPU)
        sizes = [bucket.numel for bucket in buckets]
        for number, size in enumerate(sizes):
            reducer.filled(number, size)
        large = [size for size in sizes if size > 10_000]
        assert len(large) == 3
        assert reported == list(enumerate(large))
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


def test_ranks_with_other_buckets_are_reported_before_they_part() -> None:
    auto = by_size().settle(gradient_bytes=10**6)

    def on_rank(world: World) -> None:
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        reducer = AutoReducer(auto, comm=world.duplicate(), make=make_real(world, topology, made=[]))
        numel = 100 if world.rank == 0 else 100_000
        bucket = Bucket(torch.float32, (Slot(0, 0, numel - 1, numel - 1),), numel)
        reducer.plan([bucket], device=CPU)

    with pytest.raises(BufferMismatch, match="rank 0"):
        run_threads(3, on_rank)
