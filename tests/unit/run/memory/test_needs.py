"""What each way to split a model needs, by formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hpctrain.distributed import ParallelPlan
from hpctrain.reduce import Algorithm, ReductionNeeds, gathered_in_a_ring
from hpctrain.run.memory.layouts import layout_name, ways_to_split
from hpctrain.run.memory.needs import Needs, needs_of
from hpctrain.run.memory.sizes import (
    Activations,
    LayerActivations,
    LoaderSizes,
    Measured,
    MeasuredPart,
    ModelSizes,
    ParameterSize,
    RankGroups,
    RunSizes,
    StageSizes,
    TensorMessages,
    line_through,
)
from hpctrain.topology import ParallelMesh, Topology

MB = 10**6
PLAN = {"blocks.*.up": "column"}


def transformer(*, layers: int, rows: int = 1000) -> ModelSizes:
    """float32 with AdamW: blocks of one million elements, which are split, and half a million outside of them."""
    inside = [
        ParameterSize(shape=(rows, MB // rows), itemsize=4, block=f"blocks.{n}", state_bytes=8 * MB,
                      name=f"blocks.{n}.up", tensor_dim=0)
        for n in range(layers)
    ]  # fmt: skip
    outside = ParameterSize(
        shape=(500, 1000), itemsize=4, state_bytes=4 * MB, other_state_bytes=4, name="tokens"
    )
    return ModelSizes(parameters=(outside, *inside), buffer_bytes=1000)


def topology_of(num_ranks: int, ranks_per_node: int) -> Topology:
    return Topology.from_node_names([f"{rank // ranks_per_node}" for rank in range(num_ranks)])


def run_on(
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    global_batch: int = 64,
    stages: tuple[int, int] | None = None,
    **sizes: Any,
) -> RunSizes:
    """stages: number of them, and of layers of the transformer."""

    def reduction(buckets: int) -> ReductionNeeds:
        return ReductionNeeds(
            algorithm=Algorithm.FLAT, buckets=buckets, wire=3 * MB, residuals=0, sent=7 * MB, sent_between_nodes=2 * MB
        )  # fmt: skip

    if stages is not None:
        number, layers = stages
        each = layers // number
        sizes["stages"] = {
            number: StageSizes(
                # The embedding comes before the first block, the head's loss after the last.
                layers=tuple(range(1 + each * n - (n == 0), 1 + each * (n + 1)) for n in range(number)),
                stage_of={"tokens": 0, **{f"blocks.{n}.up": n // each for n in range(layers)}},
            )
        }
    return RunSizes(
        topology=topology_of(num_ranks, ranks_per_node or num_ranks), global_batch=global_batch,
        reductions={"none": reduction(100 * MB), "optimizer": reduction(100 * MB), "gradients": reduction(24 * MB)},
        **sizes,
    )  # fmt: skip


def needs(plan: ParallelPlan, model: ModelSizes, run: RunSizes, micro_batches: int = 1) -> Needs:
    return needs_of(plan, model, run, micro_batches)


NONE = ParallelPlan()
OPTIMIZER, GRADIENTS = ParallelPlan(shard="optimizer"), ParallelPlan(shard="gradients")
SHARDED = ParallelPlan(shard="parameters")
WITHIN = ParallelPlan(shard="parameters", shard_within="node")


def tensor(size: int, **keys: Any) -> ParallelPlan:
    return ParallelPlan(tensor=size, tensor_plan=PLAN, **keys)


def test_sharded_parameters_take_16_bytes_of_an_nth() -> None:
    model = transformer(layers=24)
    for num_ranks in (2, 4, 5):
        found = needs(SHARDED, model, run_on(num_ranks))
        assert found.held == pytest.approx(16 * model.num_elements / num_ranks, rel=1e-3)
    whole = needs(NONE, model, run_on(4))
    assert whole.parameters == 4 * model.num_elements
    assert whole.optimizer == 8 * model.num_elements + 4
    assert whole.gradients == 100 * MB
    assert (whole.sent, whole.gathered) == ((7 * MB, 2 * MB), 0)


def test_a_sharded_optimizer_takes_8_bytes_of_an_nth_and_sharded_gradients_4_more() -> None:
    model, run = transformer(layers=24), run_on(4)
    elements = model.num_elements
    first, second = needs(OPTIMIZER, model, run), needs(GRADIENTS, model, run)
    for found in (first, second):
        assert found.parameters == 4 * elements
        assert found.optimizer == pytest.approx(8 * elements / 4, rel=1e-3)
        assert found.sent == (7 * MB, 2 * MB)
    assert first.gradients == pytest.approx(100 * MB + 4 * elements / 4, rel=1e-3)
    assert second.gradients == pytest.approx(4 * elements / 4, rel=1e-3)
    # The buckets on their way are its reduction's.
    assert (first.reduction, second.reduction) == (3 * MB, 27 * MB)
    # Between micro-batches whole gradients wait.
    assert needs(GRADIENTS, model, run, 2).accumulated == 4 * elements
    assert second.accumulated == 0


def test_parts_of_few_rows_are_unequal() -> None:
    model = ModelSizes(parameters=(ParameterSize(shape=(3, 10), itemsize=4, state_bytes=120),))
    assert needs(SHARDED, model, run_on(2)).parameters == 2 * 10 * 4
    assert needs(SHARDED, model, run_on(8)).parameters == 10 * 4


def test_within_nodes_each_node_has_a_replica() -> None:
    model, run = transformer(layers=8), run_on(8, ranks_per_node=2)
    world, node = needs(SHARDED, model, run), needs(WITHIN, model, run)
    assert node.parameters == pytest.approx(4 * world.parameters, rel=1e-3)
    gradients = 4 * model.num_elements
    # Between nodes half of the gradients are summed over four nodes.
    assert node.sent.between_nodes == pytest.approx(2 * 3 / 4 * gradients / 2, rel=1e-6)
    # Blocks are gathered twice, the last one and the rest once, and everything is reduced.
    moved = (3 * 4 * 8 - 4) * MB + 2 * 4 * 0.5 * MB
    assert node.sent.total == pytest.approx(moved / 2 + node.sent.between_nodes, rel=1e-6)
    assert world.sent.total == pytest.approx(moved * 7 / 8, rel=1e-6)
    assert needs(SHARDED, model, run, 3).sent.total == pytest.approx(3 * world.sent.total, rel=1e-6)


def test_an_encoded_wire_sends_less_of_sharded_gradients() -> None:
    model = transformer(layers=8)
    plain, encoded = (
        needs(SHARDED, model, run_on(4, ranks_per_node=1, sharded_sum=("direct", wire))).sent.total
        for wire in ("fp32", "fp16")
    )
    assert plain - encoded == pytest.approx(4 * model.num_elements * 3 / 4 / 2, rel=1e-6)


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    frozen = ModelSizes(
        parameters=(
            ParameterSize(shape=(100, 10), itemsize=4, trainable=False),
            ParameterSize(shape=(10, 10), itemsize=4, state_bytes=800),
        )
    )
    found = needs(SHARDED, frozen, run_on(2))
    assert (found.parameters, found.gradients, found.optimizer) == (2200, 200, 400)


def test_at_the_start_the_whole_model_is_there() -> None:
    model = transformer(layers=24)
    many = needs(SHARDED, model, run_on(96, global_batch=96))
    # It is sent from rank 0 in copies of 64 MiB.
    assert many.total == many.start == 4 * model.num_elements + 1000 + (64 << 20)
    few = needs(SHARDED, model, run_on(2))
    assert few.total > few.start


def test_split_layers_are_divided_and_the_rest_is_on_every_rank() -> None:
    model, run = transformer(layers=8), run_on(8, ranks_per_node=4)
    found = needs(tensor(4), model, run)
    elements = 8 * MB / 4 + 0.5 * MB
    assert found.held == pytest.approx(16 * elements, rel=1e-3)
    # Two data-parallel ranks, on different nodes, sum a part; the group averages what is not split.
    assert found.sent.between_nodes == pytest.approx(2 * 1 / 2 * 4 * elements, rel=1e-6)
    assert found.sent.total - found.sent.between_nodes == pytest.approx(2 * 3 / 4 * 2 * MB, rel=1e-6)
    both = needs(tensor(4, shard="parameters"), model, run)
    assert both.held == pytest.approx(16 * elements / 2, rel=1e-2)


def test_split_layers_send_activations_of_all_samples_and_those_in_blocks_again_if_they_are_recomputed() -> (
    None
):
    messages = TensorMessages(forward=1000.0, in_blocks=800.0, backward=500.0)
    model = transformer(layers=8)
    bare = run_on(4)
    run = run_on(4, measured=Measured(split=MeasuredPart(ranks=2, whole={}, messages=messages)))
    # 64 samples on two data-parallel ranks.
    more = needs(tensor(2), model, run).sent.total - needs(tensor(2), model, bare).sent.total
    assert more == pytest.approx(2 * 1 / 2 * 32 * 1500, rel=1e-9)
    again = needs(tensor(2, activation_checkpointing="blocks"), model, run).sent.total
    assert again - needs(tensor(2), model, run).sent.total == pytest.approx(32 * 800, rel=1e-9)


def test_activations_of_split_layers_follow_from_two_measurements() -> None:
    def line(sample: float) -> Activations:
        return Activations(fixed_bytes=0, sample_bytes=sample)

    measured = Measured(
        whole={"none": line(100)},
        split=MeasuredPart(ranks=2, whole={"none": line(70)}),
        sequence=MeasuredPart(ranks=4, whole={"none": line(40)}),
    )
    # 60 of 100 are divided, with sequences 80.
    assert measured.activation_bytes(NONE, samples=10) == 1000
    assert measured.activation_bytes(tensor(2), samples=10) == 700
    assert measured.activation_bytes(tensor(4), samples=10) == 550
    assert measured.activation_bytes(tensor(2, sequence=True), samples=10) == 600
    assert measured.activation_bytes(tensor(4, sequence=True), samples=10) == 400
    assert measured.activation_bytes(ParallelPlan(activation_checkpointing="blocks"), samples=10) is None
    assert measured.activation_bytes(tensor(2, activation_checkpointing="blocks"), samples=10) is None


LAYERS = LayerActivations(
    kept=tuple(Activations(fixed_bytes=0, sample_bytes=kept) for kept in (10, *[100] * 8, 50)),
    more=tuple(Activations(fixed_bytes=0, sample_bytes=more) for more in (1, *[7] * 8, 3)),
    output_bytes=(10.0, *[10.0] * 8, 0.0),
)


def in_pipeline(schedule: str, micro_batches: int, *, stages: int = 4, **keys: Any) -> Needs:
    plan = ParallelPlan(pipeline=4, schedule=schedule, micro_batches=micro_batches, **keys)  # type: ignore[arg-type]
    run = run_on(8, stages=(stages, 8), measured=Measured(layers={"none": LAYERS}))
    return needs(plan, transformer(layers=8), run, micro_batches)


def test_a_pipelines_ranks_hold_their_stages_and_of_1f1b_the_first_most_activations() -> None:
    found = in_pipeline("1f1b", 8)
    elements = 2.5 * MB  # two blocks and the embedding
    assert found.held == pytest.approx(16 * elements, rel=1e-3)
    # 32 samples on each of two replicas, 4 in a micro-batch, of which four are in flight on the first rank.
    kept, arriving = 4 * 4 * (10 + 2 * 100), 32 * 10
    assert found.activations == kept + arriving + 4 * 7
    assert in_pipeline("gpipe", 8).activations == 8 * 4 * (10 + 2 * 100) + arriving + 4 * 7
    # Two stages of one block on each rank: 11 of 2 x 8 are in flight, and more arrives.
    both = in_pipeline("interleaved", 8, stages=8)
    assert both.activations == 11 * 4 * (10 + 2 * 100) / 2 + 32 * 30 + 4 * 7


def test_ranks_with_one_stage_hold_shares_of_its_optimizer() -> None:
    whole, found = in_pipeline("1f1b", 8), in_pipeline("1f1b", 8, shard="optimizer")
    elements = 2.5 * MB
    assert found.held == pytest.approx((8 + 12 / 2) * elements, rel=1e-3)
    assert found.gradients == pytest.approx((4 + 4 / 2) * elements, rel=1e-3)
    assert found.held < whole.held
    assert found.sent == whole.sent


def test_a_pipeline_sends_activations_and_their_gradients_and_sums_gradients_of_stages() -> None:
    found = in_pipeline("1f1b", 8)
    summed = 2 * 1 / 2 * 4 * 8.5 * MB / 4
    # Three boundaries, there and back, 64 samples of 10 bytes, over 8 ranks.
    assert found.sent.total == pytest.approx(summed + 3 * 2 * 64 * 10 / 8, rel=1e-6)
    assert found.sent.between_nodes == 0


def split_pipeline(*, replicas: int = 1, **keys: Any) -> Needs:
    """Four stages of two blocks, each block split over two ranks, with half of a layer's activations divided."""
    plan = tensor(2, pipeline=4, micro_batches=8, **keys)
    half = LayerActivations(
        kept=tuple(replace(line, sample_bytes=line.sample_bytes * 3 / 4) for line in LAYERS.kept),
        more=LAYERS.more, output_bytes=LAYERS.output_bytes,
    )  # fmt: skip
    messages = TensorMessages(forward=1000.0, in_blocks=800.0, backward=500.0)
    part = MeasuredPart(ranks=2, whole={}, layers={"none": half}, messages=messages)
    measured = Measured(layers={"none": LAYERS}, split=part)
    run = run_on(8 * replicas, ranks_per_node=2, stages=(4, 8), measured=measured)
    return needs(plan, transformer(layers=8), run, 8)


def test_split_stages_take_16_bytes_of_what_both_divide() -> None:
    found = split_pipeline()
    elements = (
        2 * MB / 2 + 0.5 * MB
    )  # two blocks, of which a rank has a half, and the embedding, which is not split
    assert found.held == pytest.approx(16 * elements, rel=1e-3)
    # 64 samples in 8 micro-batches, four of which are in flight on the first rank; a quarter of what they keep is half
    # of what two ranks divide.
    assert found.activations == 4 * 8 * (10 + 2 * 100) * 3 / 4 + 64 * 10 + 8 * 7
    # Three boundaries, there and back, by both ranks of a group, each to another node.
    between = 3 * 2 * 64 * 10 * 2 / 8
    assert found.sent.between_nodes == pytest.approx(between)
    # A stage has a quarter of the sums within its group; what is not split is averaged.
    assert found.sent.total == pytest.approx(between + 2 * (2 * MB + 64 * 1500) / 4 / 2)
    # With two replicas a rank sums its part of a stage, on average a quarter of all.
    summed = 2 * 1 / 2 * 4 * (8 * MB / 2 + 0.5 * MB) / 4
    twice = split_pipeline(replicas=2)
    assert twice.sent.total == pytest.approx(
        summed + between / 2 + 2 * (2 * MB + 32 * 1500) / 4 / 2, rel=1e-6
    )


def test_a_stage_with_sharded_parameters_is_whole_in_a_step_and_gathered_once() -> None:
    found = in_pipeline("1f1b", 8, shard="parameters")
    elements = 2.5 * MB
    assert found.held + found.gathered == pytest.approx((8 + 16 / 2) * elements, rel=1e-3)
    assert found.optimizer == pytest.approx(8 / 2 * elements, rel=1e-3)
    # Gathered once and summed once: as many bytes as whole gradients that are summed.
    assert found.sent == in_pipeline("1f1b", 8).sent
    both = split_pipeline(replicas=2, shard="parameters")
    whole = 2 * MB / 2 + 0.5 * MB
    assert both.held + both.gathered == pytest.approx((8 + 16 / 2) * whole, rel=1e-3)


def test_within_nodes_each_node_has_a_replica_of_a_stage() -> None:
    model = transformer(layers=8)
    run = run_on(16, ranks_per_node=2, stages=(4, 8))
    world, node = (
        needs(
            ParallelPlan(pipeline=4, micro_batches=4, shard="parameters", shard_within=within), model, run, 4
        )
        for within in ("world", "node")
    )
    assert node.optimizer == pytest.approx(2 * world.optimizer, rel=1e-3)
    assert node.sent.between_nodes == pytest.approx(2 * 1 / 2 * 4 * 8.5 * MB / 4 / 2, rel=1e-6)


def test_with_sequences_what_is_not_split_is_summed_as_well() -> None:
    model, run = transformer(layers=8), run_on(4)
    plain, sequence = needs(tensor(2), model, run), needs(tensor(2, sequence=True), model, run)
    assert sequence.held == plain.held
    assert sequence.sent.total - plain.sent.total == pytest.approx(2 * 2 * MB / 2, rel=1e-6)


def test_offloaded_parts_are_in_host_memory() -> None:
    model = transformer(layers=24)
    run = run_on(4, measured=Measured(whole={"none": Activations(fixed_bytes=0, sample_bytes=10 * MB)}))
    here, offloaded = (
        needs(ParallelPlan(shard="parameters", offload=offload), model, run) for offload in (False, True)
    )
    assert offloaded.held == here.host == 0
    assert offloaded.host == pytest.approx(here.held + here.update, rel=1e-6)
    assert offloaded.gathered == here.gathered
    assert here.total - offloaded.total == pytest.approx(here.parameters + here.optimizer, rel=1e-6)


@pytest.mark.parametrize(("num_ranks", "per_node"), [(16, 4), (24, 6), (8, 8), (12, 2)])
def test_groups_are_those_of_the_mesh(num_ranks: int, per_node: int) -> None:
    topology = topology_of(num_ranks, per_node)
    groups = RankGroups(topology)
    for plan in (
        tensor(2, pipeline=2, micro_batches=2),
        ParallelPlan(pipeline=4, micro_batches=4),
        tensor(2),
    ):
        mesh = ParallelMesh.plan(topology, pipeline=plan.pipeline, tensor=plan.tensor)
        assert groups.num_data_ranks(plan) == len(mesh.data_ranks())
        pipelines = {mesh.pipeline_axis(rank).ranks for rank in range(num_ranks)}
        for place, far in enumerate(groups.far_messages(plan)):
            following = (place + 1) % plan.pipeline
            assert far == sum(
                topology.node_of(ranks[place]) != topology.node_of(ranks[following]) for ranks in pipelines
            )
        for place in range(plan.pipeline):
            ranks = mesh.data_ranks(stage=place)
            assert groups.ring(plan, place=place) == gathered_in_a_ring(1.0, ranks=ranks, topology=topology)


@given(
    layers=st.integers(0, 6), num_ranks=st.integers(1, 40), per_node=st.integers(1, 8),
    rows=st.sampled_from([7, 1000]), fixed=st.integers(0, 10**8), sample=st.integers(0, 10**8),
)  # fmt: skip
def test_more_micro_batches_never_need_more_from_the_second_on(
    layers: int, num_ranks: int, per_node: int, rows: int, fixed: int, sample: int
) -> None:
    line = Activations(fixed_bytes=fixed, sample_bytes=sample)
    lines = {"none": line, "blocks": line, "selective": line}
    part = MeasuredPart(ranks=2, whole=lines)
    run = run_on(
        num_ranks, ranks_per_node=per_node, measured=Measured(whole=lines, split=part, sequence=part)
    )
    model = transformer(layers=layers, rows=rows)
    for plan in ways_to_split(run.topology, tensor_plan={**PLAN, "tokens": "sequence"}, offload=True):
        totals = [needs(plan, model, run, parts).total for parts in (2, 3, 5, 8, 64, 65)]
        assert totals == sorted(totals, reverse=True), layout_name(plan)
        first = needs(plan, model, run)
        assert first.total >= first.parameters + first.optimizer + (first.activations or 0)


def test_a_line_goes_through_what_was_measured() -> None:
    line = line_through({16: 1000, 32: 1800})
    assert [line.at(16), line.at(32), line.at(64)] == [1000, 1800, 3400]
    assert line_through({4: 100}).at(8) == 200
    assert line_through({16: 1000, 32: 1800}, besides=10).at(32) == 1800 + 320
    # Nothing is less than fixed: then the line goes through the origin.
    assert line_through({2: 10, 4: 100}).at(1) == 25


def test_gradients_of_sharded_parameters_come_while_activations_go() -> None:
    model = transformer(layers=24)
    lines = {"none": Activations(fixed_bytes=0, sample_bytes=10 * MB)}
    run = run_on(4, measured=Measured(whole=lines))
    once, twice = needs(SHARDED, model, run), needs(SHARDED, model, run, 2)
    assert once.activations == 160 * MB
    assert once.total == once.parameters + once.optimizer + once.buffers + 160 * MB + once.gathered
    # In the second micro-batch the gradients of the first are there.
    assert twice.total == (
        twice.parameters + twice.optimizer + twice.gradients + twice.buffers + 80 * MB + twice.gathered
    )


def test_on_gpus_the_optimizers_step_makes_a_copy_of_all_parameters() -> None:
    model = transformer(layers=24)
    gpu, cpu = (needs(NONE, model, run_on(1, update_at_once=at_once)) for at_once in (True, False))
    assert gpu.total - cpu.total == 4 * model.num_elements - 8 * MB


def test_the_loader_holds_batches_read_ahead_and_no_more_than_an_epoch() -> None:
    loader = LoaderSizes(sample_bytes=100, num_samples=1000, prefetch_bytes=10**6, cache_bytes=5)
    assert loader.held(samples=16, data_ranks=4) == 250 * 100 + 16 * 100 + 5
    run, model = run_on(4, loader=loader), transformer(layers=2)
    assert needs(NONE, model, run).data == 250 * 100 + 16 * 100 + 5
    # Two ranks of a tensor group read the same samples.
    assert needs(tensor(2), model, run).data == 500 * 100 + 32 * 100 + 5
