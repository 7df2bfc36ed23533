"""Which ways there are to split a model, in which order, and which is chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hpctrain.distributed import ParallelPlan
from hpctrain.run.memory.calculate import (
    Way,
    best_of_families,
    describe_cost,
    first_that_fits,
    fit_of,
    recipe_lines,
    usual_fit,
)
from hpctrain.run.memory.layouts import layout_name, micro_batch_choices, ways_to_split
from hpctrain.run.memory.needs import needs_of
from hpctrain.run.memory.sizes import Activations, Measured, RunSizes
from tests.unit.run.memory.test_needs import PLAN, run_on, topology_of, transformer

MB = 10**6


def names(num_ranks: int, ranks_per_node: int, **keys: Any) -> list[str]:
    return [layout_name(plan) for plan in ways_to_split(topology_of(num_ranks, ranks_per_node), **keys)]


def test_whole_parameters_come_first_then_sharded_ones() -> None:
    assert names(1, 1) == ["none", "none, selective", "none, blocks"]
    one_node = [
        "none", "optimizer", "gradients", "none, selective", "optimizer, selective", "gradients, selective",
        "none, blocks", "optimizer, blocks", "gradients, blocks",
        "parameters", "parameters, selective", "parameters, blocks",
    ]  # fmt: skip
    assert names(4, 4) == names(4, 1) == one_node
    assert names(4, 2)[9:12] == ["parameters within node", "parameters", "parameters within node, selective"]
    # Unequal nodes have no equal replicas.
    assert "parameters within node" not in names(5, 3)


def test_layers_are_split_within_nodes_if_the_task_says_how() -> None:
    found = names(8, 4, tensor_plan=PLAN)[len(names(8, 4)) :]
    assert found[0] == "none, tensor 2"
    split = {name for name in found if "selective" not in name and "blocks" not in name}
    assert split == {
        "none, tensor 2", "parameters within node, tensor 2", "parameters, tensor 2", "none, tensor 4",
        "parameters, tensor 4",
    }  # fmt: skip
    assert not any("tensor" in name for name in names(3, 1, tensor_plan=PLAN))


def test_pipelines_come_last_with_each_schedule() -> None:
    found = names(6, 3, in_stages=True)[len(names(6, 3)) :]
    assert found[:5] == [
        "pipeline 2 1f1b", "pipeline 2 interleaved", "pipeline 2 zero-bubble", "pipeline 2 gpipe",
        "pipeline 2 1f1b, optimizer",
    ]  # fmt: skip
    assert {name.split()[1] for name in found} == {"2", "3", "6"}
    assert "pipeline 3 gpipe, optimizer, selective" in found
    # Not through a block twice; and where each stage is on one rank there are no shares of it.
    assert not any("zero-bubble" in name and "selective" in name for name in found)
    assert not any("pipeline 6" in name and "optimizer" in name for name in found)


def test_stages_may_be_sharded_within_nodes_or_split_further() -> None:
    found = set(names(16, 4, in_stages=True))
    assert {"pipeline 2 1f1b, parameters within node", "pipeline 2 1f1b, parameters"} <= found
    # A stage of one node's ranks has no replicas on others.
    assert "pipeline 4 1f1b, parameters" in found
    assert "pipeline 4 1f1b, parameters within node" not in found
    both = names(16, 4, tensor_plan=PLAN, in_stages=True, stages_of_parts=[(2, 2), (4, 4)])
    split = [name for name in both if "pipeline" in name and "tensor" in name and "1f1b" in name]
    # After pipelines alone.
    assert both[-1].startswith("pipeline 4 gpipe, tensor 4, selective")
    assert [name for name in split if "selective" not in name and "blocks" not in name] == [
        "pipeline 2 1f1b, tensor 2", "pipeline 2 1f1b, parameters within node, tensor 2",
        "pipeline 2 1f1b, parameters, tensor 2", "pipeline 4 1f1b, tensor 4",
    ]  # fmt: skip


def test_sequences_are_split_if_the_task_says_how_and_offload_comes_last() -> None:
    found = names(4, 4, tensor_plan={**PLAN, "norm": ("sequence", 8)}, offload=True)
    assert found[12:14] == ["none, tensor 2", "none, tensor 2, sequence"]
    assert "parameters, tensor 2, sequence, blocks" in found
    assert found[-3:] == [
        "parameters, offload",
        "parameters, offload, blocks",
        "parameters, offload, selective",
    ]
    assert not any("sequence" in name or "offload" in name for name in names(4, 4, tensor_plan=PLAN))


def test_micro_batches_are_as_few_as_each_size_needs() -> None:
    assert micro_batch_choices(ParallelPlan(), samples=16, at_least=1) == [1, 2, 3, 4, 6, 8, 16]
    assert micro_batch_choices(ParallelPlan(), samples=16, at_least=5) == [5, 6, 8, 16]
    assert micro_batch_choices(ParallelPlan(), samples=3, at_least=8) == [8]
    pipeline = ParallelPlan(pipeline=4, micro_batches=4)
    assert micro_batch_choices(pipeline, samples=64, at_least=1) == [16, 32, 64]
    assert micro_batch_choices(pipeline, samples=64, at_least=8) == [8, 16, 32, 64]
    assert micro_batch_choices(pipeline, samples=10, at_least=1) == [10]
    assert micro_batch_choices(pipeline, samples=3, at_least=1) == []
    # Two stages per rank: a multiple of the ranks.
    interleaved = ParallelPlan(pipeline=4, micro_batches=4, schedule="interleaved")
    assert micro_batch_choices(interleaved, samples=40, at_least=1) == [20, 40]


LAYERS = transformer(layers=24)
LINES = {
    "none": Activations(fixed_bytes=0, sample_bytes=20 * MB),
    "selective": Activations(fixed_bytes=0, sample_bytes=12 * MB),
    "blocks": Activations(fixed_bytes=0, sample_bytes=5 * MB),
}


def run_of(num_ranks: int, **keys: Any) -> RunSizes:
    return run_on(num_ranks, measured=Measured(whole=LINES), **keys)  # type: ignore[arg-type]


def all_ways(run: RunSizes, *, at_least: int = 1) -> list[Way]:
    return [
        Way(
            plan=plan, needs=partial(needs_of, plan, LAYERS, run),
            choices=micro_batch_choices(plan, samples=run.samples(), at_least=at_least),
        )
        for plan in ways_to_split(run.topology)
    ]  # fmt: skip


def test_with_less_memory_micro_batches_come_first_then_shards_then_checkpointing() -> None:
    def first(memory: int) -> tuple[str, int] | None:
        found = first_that_fits(all_ways(run_of(4)), memory=memory)
        return None if found is None else (found.way.name, found.micro_batches)

    # 397 MB without activations: parameters 98, buckets 100, optimizer 196, messages 3.
    assert first(720 * MB) == ("none", 1)
    assert first(600 * MB) == ("none", 2)
    assert first(418 * MB) == ("none", 16)
    # A quarter of the moments and a share of the sums: 275 MB.
    assert first(402 * MB)[0] == "optimizer"  # type: ignore[index]
    # Sharded gradients wait whole between micro-batches, but one micro-batch has less.
    assert first(230 * MB)[0] == "parameters"  # type: ignore[index]
    assert first(90 * MB) is None


def test_what_is_refused_is_not_chosen() -> None:
    ways = [
        Way(plan=way.plan, refused="no") if way.plan.shard in ("optimizer", "gradients") else way
        for way in all_ways(run_of(4))
    ]
    found = first_that_fits(ways, memory=410 * MB)
    assert found is not None
    assert found.way.name == "none, selective"
    assert fit_of(ways[1], memory=10**12) is None
    assert usual_fit(ways[1]) is None


def test_of_each_family_the_first_that_fits_is_shown() -> None:
    ways = all_ways(run_of(4))
    assert [way.name for way in best_of_families(ways, memory=None)] == [
        "none", "optimizer", "gradients", "parameters",
    ]  # fmt: skip
    assert best_of_families(ways, memory=410 * MB)[0].name == "none, selective"
    # None fits: what needs least.
    assert best_of_families(ways, memory=1)[0].name == "none, blocks"
    # What the recipe asks for is there too.
    now = [replace(way, is_current=way.name == "none, selective") for way in ways]
    assert [way.name for way in best_of_families(now, memory=None)][:3] == [
        "none", "none, selective", "optimizer",
    ]  # fmt: skip


def test_costs_are_computing_again_and_waiting() -> None:
    ways = {way.name: way for way in all_ways(run_of(4))}

    def cost(name: str) -> str:
        fit = usual_fit(ways[name])
        assert fit is not None
        return describe_cost(fit)

    assert cost("none") == cost("parameters") == ""
    assert cost("none, selective") == "computes a little more"
    assert cost("parameters, blocks") == "computes a third more"
    fit = usual_fit(ways["none"])
    assert fit is not None
    piped = replace(ways["none"], plan=ParallelPlan(pipeline=4, micro_batches=4))
    assert describe_cost(replace(fit, way=piped, micro_batches=8)) == "waits 27%"
    fewer = replace(ways["none"], plan=ParallelPlan(pipeline=4, micro_batches=4, schedule="zero-bubble"))
    assert describe_cost(replace(fit, way=fewer, micro_batches=8)) == "waits less than 16%"
    again = replace(fewer, plan=replace(fewer.plan, activation_checkpointing="blocks"))
    assert describe_cost(replace(fit, way=again, micro_batches=8)).startswith(
        "computes blocks several times; "
    )


def test_the_lines_of_the_recipe_are_those_that_differ_from_the_usual() -> None:
    run = run_of(8, ranks_per_node=2, global_batch=128)
    ways = {way.name: way for way in all_ways(run)}

    def lines(name: str, memory: int, *, micro_batches: int = 1) -> list[str]:
        fit = fit_of(ways[name], memory=memory)
        assert fit is not None
        return recipe_lines(fit, micro_batches=micro_batches)

    assert lines("none", 10**12) == []
    assert lines("none", 600 * MB) == ["[data]", "micro_batches = 2"]
    assert lines("parameters within node, blocks", 10**12) == [
        "[parallel]", 'shard = "parameters"', 'shard_within = "node"', 'activation_checkpointing = "blocks"',
    ]  # fmt: skip


def test_the_lines_of_the_recipe_have_sequences_and_offload() -> None:
    run = run_of(4)
    some = usual_fit(all_ways(run)[0])
    assert some is not None
    split = ParallelPlan(tensor=2, tensor_plan=PLAN, sequence=True)
    offloaded = ParallelPlan(shard="parameters", offload=True)
    for plan, lines in (
        (split, ["[parallel]", "tensor = 2", "sequence = true"]),
        (offloaded, ["[parallel]", 'shard = "parameters"', "offload = true"]),
    ):
        assert recipe_lines(replace(some, way=replace(some.way, plan=plan)), micro_batches=1) == lines
    needs = replace(some.needs, host=12 * MB)
    fit = replace(some, way=replace(some.way, plan=offloaded), needs=needs)
    assert describe_cost(fit) == "copies from 12 MB in host memory"


@pytest.mark.parametrize("of_data", [1, 4])
def test_the_lines_of_a_pipeline_have_its_schedule_and_its_own_micro_batches(of_data: int) -> None:
    run = run_of(4)
    way = replace(all_ways(run)[0], plan=ParallelPlan(pipeline=4, micro_batches=4), choices=[16])
    fit = usual_fit(way)
    assert fit is not None
    expected = ["[parallel]", "pipeline = 4", 'schedule = "1f1b"', "micro_batches = 16"]
    assert recipe_lines(fit, micro_batches=of_data) == (
        expected if of_data == 1 else [*expected, "[data]", "micro_batches = 1"]
    )
