"""What each way to split a model needs, by formulas, and which is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hpctrain.distributed import ParallelPlan
from hpctrain.reduce import Algorithm, ReductionNeeds
from hpctrain.run.memory.choice import Way, first_that_fits, fit_of, recipe_lines
from hpctrain.run.memory.needs import (
    Activations,
    ModelSizes,
    Needs,
    ParameterSize,
    RunSizes,
    line_through,
    needs_of,
    ways_to_split,
)
from hpctrain.topology import Topology

MB = 10**6


def transformer(*, layers: int, rows: int = 1000) -> ModelSizes:
    """float32 with AdamW: blocks of one million elements, and half a million outside of them."""
    inside = [
        ParameterSize(shape=(rows, MB // rows), itemsize=4, block=f"blocks.{n}", state_bytes=8 * MB)
        for n in range(layers)
    ]
    outside = ParameterSize(shape=(500, 1000), itemsize=4, state_bytes=4 * MB, other_state_bytes=4)
    return ModelSizes(parameters=(outside, *inside), buffer_bytes=1000)


def topology_of(num_ranks: int, ranks_per_node: int) -> Topology:
    return Topology.from_node_names([f"{rank // ranks_per_node}" for rank in range(num_ranks)])


def run_on(
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    samples: int = 16,
    micro_batches: int = 1,
    **sizes: object,
) -> RunSizes:
    reduction = ReductionNeeds(
        algorithm=Algorithm.FLAT, buckets=100 * MB, wire=3 * MB, residuals=0, sent=7 * MB, sent_between_nodes=2 * MB
    )  # fmt: skip
    return RunSizes(
        topology=topology_of(num_ranks, ranks_per_node or num_ranks), samples=samples, micro_batches=micro_batches,
        **{"reduction": reduction, **sizes},
    )  # fmt: skip


SHARDED = ParallelPlan(shard="parameters")
WITHIN = ParallelPlan(shard="parameters", shard_within="node")


def test_sharded_parameters_take_16_bytes_of_an_nth() -> None:
    model = transformer(layers=24)
    for num_ranks in (2, 4, 5):
        found = needs_of(SHARDED, model, run_on(num_ranks))
        held = found.parameters + found.gradients + found.optimizer
        assert held == pytest.approx(16 * model.num_elements / num_ranks, rel=1e-3)
    whole = needs_of(ParallelPlan(), model, run_on(4))
    assert whole.parameters == 4 * model.num_elements
    assert whole.optimizer == 8 * model.num_elements + 4
    assert whole.gradients == 100 * MB
    assert (whole.sent, whole.sent_between_nodes, whole.whole) == (7 * MB, 2 * MB, 0)


def test_parts_of_few_rows_are_unequal() -> None:
    model = ModelSizes(parameters=(ParameterSize(shape=(3, 10), itemsize=4, state_bytes=120),))
    assert needs_of(SHARDED, model, run_on(2)).parameters == 2 * 10 * 4
    assert needs_of(SHARDED, model, run_on(8)).parameters == 10 * 4


def test_within_nodes_each_node_has_a_replica() -> None:
    model, run = transformer(layers=8), run_on(8, ranks_per_node=2)
    world, node = needs_of(SHARDED, model, run), needs_of(WITHIN, model, run)
    assert node.parameters == pytest.approx(4 * world.parameters, rel=1e-3)
    gradients = 4 * model.num_elements
    # Between nodes half of the gradients are summed over four nodes.
    assert node.sent_between_nodes == pytest.approx(2 * 3 / 4 * gradients / 2, rel=1e-6)
    # Blocks are gathered twice, the rest once, and everything is reduced.
    moved = 3 * 4 * 8 * MB + 2 * 4 * 0.5 * MB
    assert node.sent == pytest.approx(moved / 2 + node.sent_between_nodes, rel=1e-6)
    assert world.sent == pytest.approx(moved * 7 / 8, rel=1e-6)
    thrice = needs_of(SHARDED, model, run_on(8, micro_batches=3))
    assert thrice.sent == pytest.approx(3 * world.sent, rel=1e-6)


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    frozen = ModelSizes(
        parameters=(
            ParameterSize(shape=(100, 10), itemsize=4, trainable=False),
            ParameterSize(shape=(10, 10), itemsize=4, state_bytes=800),
        )
    )
    found = needs_of(SHARDED, frozen, run_on(2))
    assert (found.parameters, found.gradients, found.optimizer) == (2200, 200, 400)


def test_at_the_start_the_whole_model_is_there() -> None:
    model = transformer(layers=24)
    many = needs_of(SHARDED, model, run_on(96))
    assert many.total(0) == many.start == pytest.approx(4 * model.num_elements * (1 + 1 / 90), rel=0.01)
    few = needs_of(SHARDED, model, run_on(2))
    assert few.total(0) > few.start


@given(
    layers=st.integers(0, 6), num_ranks=st.integers(1, 40), per_node=st.integers(1, 8),
    rows=st.sampled_from([1, 7, 1000]), fixed=st.integers(0, 10**8), sample=st.integers(0, 10**8),
    samples=st.integers(1, 100),
)  # fmt: skip
def test_more_samples_never_need_less_and_the_largest_micro_batch_is_the_last_that_fits(
    layers: int, num_ranks: int, per_node: int, rows: int, fixed: int, sample: int, samples: int
) -> None:
    line = Activations(fixed_bytes=fixed, sample_bytes=sample)
    run = run_on(
        num_ranks, ranks_per_node=per_node, samples=samples, activations={"none": line, "blocks": line}
    )
    for plan in ways_to_split(run.topology):
        found = needs_of(plan, transformer(layers=layers, rows=rows), run)
        totals = [found.total(n) for n in range(samples + 2)]
        assert totals == sorted(totals)
        parts = (found.parameters, found.gradients, found.optimizer, found.activation_bytes(samples))
        assert sum(parts) + found.other(samples) == found.total(samples)
        for memory in (totals[0] - 1, totals[samples // 2], totals[samples], totals[-1]):
            largest = found.largest_micro_batch(memory, at_most=samples)
            assert largest == 0 or found.total(largest) <= memory
            assert largest == samples or found.total(largest + 1) > memory


def test_ways_are_those_that_the_ranks_allow() -> None:
    def ways(num_ranks: int, ranks_per_node: int) -> list[str]:
        return [Way(plan=plan).name for plan in ways_to_split(topology_of(num_ranks, ranks_per_node))]

    assert ways(1, 1) == ["none", "none, checkpointing"]
    one_node = ["none", "none, checkpointing", "parameters", "parameters, checkpointing"]
    assert ways(4, 4) == ways(4, 1) == one_node
    assert ways(4, 2) == [
        "none", "none, checkpointing", "parameters within node", "parameters",
        "parameters within node, checkpointing", "parameters, checkpointing",
    ]  # fmt: skip


def test_a_line_goes_through_what_was_measured() -> None:
    line = line_through({16: 1000, 32: 1800})
    assert [line.at(16), line.at(32), line.at(64)] == [1000, 1800, 3400]
    assert line_through({4: 100}).at(8) == 200
    assert line_through({16: 1000, 32: 1800}, besides=10).at(32) == 1800 + 320
    # Nothing is less than fixed: then the line goes through the origin.
    assert line_through({2: 10, 4: 100}).at(1) == 25


LAYERS = transformer(layers=24)
LINES = {
    "none": Activations(fixed_bytes=0, sample_bytes=20 * MB),
    "blocks": Activations(fixed_bytes=0, sample_bytes=5 * MB),
}


def all_ways(run: RunSizes) -> list[Way]:
    return [Way(plan=plan, needs=needs_of(plan, LAYERS, run)) for plan in ways_to_split(run.topology)]


def test_with_less_memory_micro_batches_come_first_then_checkpointing_then_shards() -> None:
    def first(memory: int) -> tuple[str, int] | None:
        run = run_on(4, samples=16, activations=LINES)
        found = first_that_fits(all_ways(run), run, memory=memory)
        return None if found is None else (found.way.name, found.micro_batches)

    # 397 MB without activations: parameters 98, buckets 100, optimizer 196, messages 3.
    assert first(720 * MB) == ("none", 1)
    assert first(600 * MB) == ("none", 2)
    assert first(418 * MB) == ("none", 16)
    assert first(410 * MB) == ("none, checkpointing", 8)
    assert first(300 * MB) == ("parameters", 2)
    assert first(100 * MB) is None


def test_what_is_refused_is_not_chosen() -> None:
    run = run_on(4, samples=16, activations=LINES)
    ways = [
        Way(plan=way.plan, refused="no blocks") if way.plan.activation_checkpointing == "blocks" else way
        for way in all_ways(run)
    ]
    found = first_that_fits(ways, run, memory=410 * MB)
    assert found is not None
    assert found.way.name == "parameters"
    assert fit_of(ways[1], run, memory=10**12) is None


def test_the_lines_of_the_recipe_are_those_that_differ_from_the_usual() -> None:
    run = run_on(8, ranks_per_node=2, samples=16, activations=LINES)
    ways = {way.name: way for way in all_ways(run)}

    def lines(name: str, memory: int) -> list[str]:
        fit = fit_of(ways[name], run, memory=memory)
        assert fit is not None
        return recipe_lines(fit, run)

    assert lines("none", 10**12) == []
    assert lines("none", 600 * MB) == ["[data]", "micro_batches = 2"]
    assert lines("parameters within node, checkpointing", 10**12) == [
        "[parallel]", 'shard = "parameters"', 'shard_within = "node"', 'activation_checkpointing = "blocks"',
    ]  # fmt: skip


def test_on_gpus_the_optimizers_step_makes_a_copy_of_all_parameters() -> None:
    model = transformer(layers=24)
    gpu, cpu = (
        needs_of(ParallelPlan(), model, run_on(1, update_at_once=at_once)) for at_once in (True, False)
    )
    assert isinstance(gpu, Needs)
    assert gpu.total(0) - cpu.total(0) == 4 * model.num_elements - 8 * MB
