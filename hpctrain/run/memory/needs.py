"""Calculates memory and traffic of a rank for each way to split a model, by formulas. Pure.

The sources of the formulas are Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, Shoeybi et al. 2019 (tensor
parallelism), arXiv:1909.08053, Narayanan et al. 2021 (pipelines), arXiv:2104.04473, and what FSDP2 allocates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.comm import MESSAGE_BYTES
from hpctrain.distributed import ParallelPlan
from hpctrain.reduce import Sent, all_sent, sharded_sum
from hpctrain.run.memory.sizes import LayerActivations, ModelSizes, ParameterSize, RunSizes, StageSizes

# What the stages of a pipeline keep between forward and backward. Pure.


def stage_activations(
    plan: ParallelPlan,
    stages: StageSizes,
    layers: LayerActivations,
    *,
    place: int,
    samples: int,
    micro_batches: int,
) -> int:
    """Returns the peak bytes of a pipeline rank besides parameters and gradients.

    Forward of a micro-batch keeps what the stage needs for backward. For each micro-batch PyTorch also holds buffers
    for what arrives: activations from the previous stage, and gradients from the next stage.

    place: the rank's index in the pipeline, which is also the index of the rank's first stage.
    samples: the number of samples per micro-batch.
    """
    own = [layers_of for number, layers_of in enumerate(stages.layers) if number % plan.pipeline == place]
    kept = [sum(layers.kept[layer].at(samples) for layer in of_stage) for of_stage in own]
    has_last = place == plan.pipeline - 1
    if has_last:
        kept[-1] += layers.kept[-1].at(samples)  # of the loss
    used = [layer for of_stage in own for layer in of_stage] + ([len(layers.kept) - 1] if has_last else [])
    more = max(layers.more[layer].at(samples) for layer in used)
    in_flight = chunks_in_flight(plan, place=place, micro_batches=micro_batches)
    arriving = micro_batches * samples * _arriving(plan, stages, layers, place=place)
    return math.ceil(in_flight * sum(kept) / len(kept) + arriving) + more


def chunks_in_flight(plan: ParallelPlan, *, place: int, micro_batches: int) -> int:
    """Returns how many forwards of the rank wait for their backward at the same time, at most.

    The forward of one micro-batch in one of the rank's stages counts as one. The number follows the schedules of
    torch.distributed.pipelining: the forwards before the first backward, and one more.
    """
    after = plan.pipeline - 1 - place
    if plan.schedule == "gpipe":
        return micro_batches
    if plan.schedule == "1f1b":
        return min(micro_batches, after + 1)
    if plan.schedule == "interleaved":
        return min(2 * micro_batches, plan.pipeline + 2 * after + 1)
    # Gradients of weights wait, on later ranks longer.
    return min(2 * micro_batches, 2 * plan.pipeline)


def boundary_bytes(stages: StageSizes, layers: LayerActivations) -> list[float]:
    """Returns the bytes per sample that each stage but the last sends to the next stage."""
    return [layers.output_bytes[of_stage[-1]] for of_stage in stages.layers[:-1]]


def _arriving(plan: ParallelPlan, stages: StageSizes, layers: LayerActivations, *, place: int) -> float:
    """Returns the bytes per sample that the rank receives from stages on other ranks."""
    between = boundary_bytes(stages, layers)
    numbers: Sequence[int] = range(place, len(stages.layers), plan.pipeline)
    found = 0.0
    for number in numbers:
        found += between[number - 1] if number > 0 else 0.0
        found += between[number] if number < len(between) else 0.0
    return found


# The bytes that a rank sends per step for each way to split a model. Pure.


NOTHING = Sent(0.0, 0.0)


def sent_in_a_step(plan: ParallelPlan, model: ModelSizes, run: RunSizes, *, micro_batches: int) -> Sent:
    """Returns the bytes that a rank sends per step, as the mean over the ranks. Unmeasured activations count as 0."""
    if plan.pipeline > 1:
        return _of_pipeline(plan, model, run)
    if plan.shard == "parameters":
        return all_sent(
            _of_shards(plan, model, run).times(micro_batches),
            _within_tensor_groups(plan, model, run),
        )
    if plan.tensor > 1:
        gradients = sum(p.num_bytes for p in model.part(plan.tensor).trained)
        summed = run.groups.ring(plan).times(2 * gradients)
        return all_sent(summed, _within_tensor_groups(plan, model, run))
    reduction = run.reductions[plan.shard]
    return Sent(reduction.sent, reduction.sent_between_nodes)


def _of_shards(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Returns the bytes that a rank sends per micro-batch if parameters are sharded.

    Blocks are gathered in forward and, except for the last one, in backward. Parameters outside blocks are gathered in
    forward. All gradients are reduced.
    """
    local = model.part(plan.tensor)
    blocks = local.blocks()
    rest, _ = blocks.pop("", (0, 0))
    sizes = [size for size, _ in blocks.values()]
    gathered = rest + 2 * sum(sizes) - sum(sizes[-1:])
    gradients = sum(p.num_bytes for p in local.trained)
    if plan.tensor > 1:
        return _gathered_and_summed(plan, run, parameters=gathered, gradients=gradients)
    algorithm, wire = run.sharded_sum
    itemsize = max((p.itemsize for p in local.trained), default=4)
    summed = sharded_sum(
        gradients, algorithm=algorithm, wire=wire, within=plan.shard_within, topology=run.topology,
        itemsize=itemsize,
    )  # fmt: skip
    return all_sent(_gathered_and_summed(plan, run, parameters=gathered, gradients=0), summed)


def _gathered_and_summed(
    plan: ParallelPlan, run: RunSizes, *, parameters: int, gradients: int, place: int = 0
) -> Sent:
    """Returns the bytes that a rank sends to gather parameters and to reduce-scatter gradients, as FSDP2 does.

    parameters, gradients: their bytes.
    place: index of the rank in its pipeline.
    """
    within_node = plan.shard_within == "node"
    found = run.groups.ring(plan, place=place, within=within_node).times(parameters + gradients)
    if within_node:
        # Each owner has a part of its node's sum.
        part = 2 * gradients / run.groups.num_parts(plan)
        found = all_sent(found, run.groups.ring(plan, place=place, across=True).times(part))
    return found


def _within_tensor_groups(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Returns the bytes that a rank sends per step within its tensor group, which lies on one node.

    The bytes are activations, and the gradients of parameters that every rank of the group holds.
    """
    tensor = plan.tensor
    if tensor == 1:
        return NOTHING
    alike = sum(p.num_bytes for p in model.trained if p.tensor_dim is None)
    averaged = alike / run.groups.num_data_ranks(plan) if plan.shard == "parameters" else alike
    # Gradients that were computed on parts of the sequence are summed before they are averaged.
    summed = averaged + (alike if plan.sequence else 0)
    part = run.measured.part(plan)
    messages = part.messages if part is not None else None
    if messages is not None:
        again = messages.in_blocks if plan.activation_checkpointing != "none" else 0.0
        samples = run.samples(ranks_of_a_sample=tensor * plan.pipeline)
        summed += samples * (messages.forward + again + messages.backward)
    # A stage has its layers' part of this.
    return Sent(2 * summed / plan.pipeline * (tensor - 1) / tensor, 0.0)


def _of_pipeline(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Returns the bytes that a rank of a pipeline sends per step.

    The bytes are activations and their gradients between stages, and the sum of gradients over the replicas. With a
    sharded optimizer, gradients are sent to their owners, who send as many bytes of parameters. Sharded parameters are
    gathered once per step.
    """
    stages = run.stages[plan.pipeline * plan.stages_per_rank]
    found = []
    for place in range(plan.pipeline):
        local = model.on_place(place, stages=stages, pipeline=plan.pipeline).part(plan.tensor)
        gradients = sum(p.num_bytes for p in local.trained)
        if plan.shard == "parameters":
            found.append(
                _gathered_and_summed(plan, run, parameters=local.num_bytes, gradients=gradients, place=place)
            )
        else:
            found.append(run.groups.ring(plan, place=place).times(2 * gradients))
    summed = all_sent(*found).times(1 / plan.pipeline)
    return all_sent(summed, _between_stages(plan, stages, run), _within_tensor_groups(plan, model, run))


def _between_stages(plan: ParallelPlan, stages: StageSizes, run: RunSizes) -> Sent:
    layers = run.measured.layers_of(plan)
    if layers is None:
        return NOTHING
    samples = run.samples(ranks_of_a_sample=plan.pipeline * plan.tensor)
    num_ranks, far_messages = run.topology.num_ranks, run.groups.far_messages(plan)
    total = far = 0.0
    for number, num_bytes in enumerate(boundary_bytes(stages, layers)):
        both = 2 * samples * num_bytes  # there, and its gradient back
        total += both * (num_ranks // plan.pipeline)
        far += both * far_messages[number % plan.pipeline]
    return Sent(math.ceil(total / num_ranks), math.ceil(far / num_ranks))


# What a rank needs for each way to split a model.


# The bytes per copy in which gradients of split layers and of a sharded stage are summed.
_SUMMED_AT_ONCE = 25_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The memory in bytes of the rank that needs most, for one way to split the model and one number of micro-batches.

    Attributes:
        parameters: The rank's parameters.
        gradients: The rank's gradients.
        optimizer: The rank's optimizer state.
        reduction: Messages, and gradients in transit.
        buffers: The model's buffers, and the averages of the parameters.
        gathered: For sharded parameters, the whole parameters of blocks while the blocks are computed.
        gathered_gradients: For sharded parameters, the whole gradients of blocks while the blocks are computed.
        accumulated: Whole gradients that are kept until the last micro-batch, though the rank owns only a part.
        data: The batches in memory.
        snapshot: The copy of the state for a save in the background.
        activations: The peak of the activations, at the start of backward; None if not measured.
        late_activations: The activations at the end of backward.
        update: Temporary tensors of the optimizer's step.
        start: The peak at the start of the run, while the rank holds the whole model.
        gradients_stay: Whether the gradients also occupy memory at the start of backward.
        host: For a GPU rank with offload, the bytes in host memory, which do not count as GPU memory.
        sent: What the rank sends to other ranks per step.
    """

    parameters: int
    gradients: int
    optimizer: int
    reduction: int = 0
    buffers: int = 0
    gathered: int = 0
    gathered_gradients: int = 0
    accumulated: int = 0
    data: int = 0
    snapshot: int = 0
    update: int = 0
    start: int = 0
    activations: int | None = None
    late_activations: int = 0
    gradients_stay: bool = True
    host: int = 0
    sent: Sent

    @property
    def held(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def other(self) -> int:
        """Bytes that have no column of their own in tables. Not all of these bytes are held at the same time."""
        return (
            self.buffers
            + self.gathered
            + self.gathered_gradients
            + self.accumulated
            + self.data
            + self.snapshot
        )

    @property
    def total(self) -> int:
        """The peak bytes: at the start or end of backward, in the optimizer's step, or at the start of the run."""
        always = self.parameters + self.optimizer + self.reduction + self.buffers + self.data + self.snapshot
        begin = always + (self.activations or 0) + self.gathered + self.accumulated
        begin += self.gradients if self.gradients_stay else 0
        end = always + self.gradients + self.gathered + self.gathered_gradients + self.late_activations
        return max(begin, end, always + self.gradients + self.update, self.start)


def needs_of(plan: ParallelPlan, model: ModelSizes, run: RunSizes, micro_batches: int) -> Needs:
    """Returns the memory that a rank needs to train `model` as `plan` says.

    micro_batches: number of micro-batches per step.
    """
    found = _without_averages(plan, model, run, micro_batches)
    if not run.averages:
        return found
    # Averages are as large as the rank's parameters, and in the same memory.
    averages = _without_averages(replace(plan, offload=False), model, run, micro_batches).parameters
    if plan.offload:
        return replace(found, host=found.host + averages)
    return replace(found, buffers=found.buffers + averages)


def _without_averages(plan: ParallelPlan, model: ModelSizes, run: RunSizes, micro_batches: int) -> Needs:
    if plan.pipeline > 1:
        ranks = (
            _of_stages(plan, model, run, place=place, micro_batches=micro_batches)
            for place in range(plan.pipeline)
        )
        return max(ranks, key=lambda needs: needs.total)
    if plan.shard in ("optimizer", "gradients"):
        return _of_sharded_optimizer(plan, model, run, micro_batches=micro_batches)
    samples = math.ceil(run.samples(ranks_of_a_sample=plan.tensor) / micro_batches)
    local = model.part(plan.tensor)
    parts = run.groups.num_parts(plan)
    sharded, split = plan.shard == "parameters", plan.tensor > 1
    reduction = run.reductions["none"]
    gathered, gathered_gradients = _whole_blocks(local) if sharded else (0, 0)
    parameters = _bytes(local.parameters, parts)
    updated = _update(local, run, parts=parts)
    if split:
        # Parameters that every rank of a tensor group holds, such as norms, are summed too; without FSDP2 all are.
        updated = max(updated, min(_SUMMED_AT_ONCE, _bytes(local.trained, parts)))
    activations, late = _activations(plan, model, run, samples=samples)
    found = Needs(
        parameters=parameters,
        gradients=_bytes(local.trained, parts) if sharded or split else reduction.buckets,
        optimizer=_optimizer(local, parts),
        reduction=0 if sharded or split else reduction.spare + reduction.wire + reduction.residuals,
        buffers=model.buffer_bytes,
        gathered=gathered,
        gathered_gradients=gathered_gradients,
        data=_data(plan, run),
        snapshot=_snapshot(model, run),
        update=updated,
        # The optimizer is made before the model is split, and keeps the whole parameters until it is made again.
        start=_start(model, parts=parameters if sharded or split else 0),
        activations=activations,
        late_activations=late,
        gradients_stay=not (sharded or split) or micro_batches > 1,
        sent=sent_in_a_step(plan, model, run, micro_batches=micro_batches),
    )
    if plan.offload:
        # The optimizer steps in the memory of its state.
        return replace(
            found, parameters=0, gradients=0, optimizer=0, update=0, host=found.held + found.update
        )
    return found


def _of_sharded_optimizer(
    plan: ParallelPlan, model: ModelSizes, run: RunSizes, *, micro_batches: int
) -> Needs:
    reduction, num_ranks = run.reductions[plan.shard], run.topology.num_ranks
    samples = math.ceil(run.samples() / micro_batches)
    gradients = sum(p.num_bytes for p in model.trained)
    sums = math.ceil(gradients / num_ranks)
    held = reduction.buckets if plan.shard == "optimizer" else 0
    activations, late = _activations(plan, model, run, samples=samples)
    state = sum(p.state_bytes for p in model.trained) / num_ranks
    return Needs(
        parameters=model.num_bytes,
        gradients=held + sums,
        optimizer=math.ceil(state + sum(p.other_state_bytes for p in model.trained)),
        reduction=reduction.buckets - held + reduction.spare + reduction.wire + reduction.residuals,
        buffers=model.buffer_bytes,
        accumulated=gradients if micro_batches > 1 else 0,
        data=_data(plan, run),
        snapshot=_snapshot(model, run),
        # The largest part of a parameter is at most that of its bucket.
        update=min(2 * max((p.num_bytes for p in model.trained), default=0), 2 * sums),
        start=_start(model),
        activations=activations,
        late_activations=late,
        sent=sent_in_a_step(plan, model, run, micro_batches=micro_batches),
    )


def _of_stages(
    plan: ParallelPlan, model: ModelSizes, run: RunSizes, *, place: int, micro_batches: int
) -> Needs:
    """Returns the memory that the rank with index `place` in a pipeline needs.

    The rank's stages are `place` and, if each rank has two stages, `place + pipeline`.
    """
    stages = run.stages[plan.pipeline * plan.stages_per_rank]
    own = model.on_place(place, stages=stages, pipeline=plan.pipeline).part(plan.tensor)
    samples = run.samples(ranks_of_a_sample=plan.pipeline * plan.tensor) // micro_batches
    layers = run.measured.layers_of(plan)
    found = None
    if layers is not None:
        found = stage_activations(
            plan, stages, layers, place=place, samples=samples, micro_batches=micro_batches
        )
    replicas, parts = run.groups.num_data_ranks(plan), run.groups.num_parts(plan)
    gradients = _bytes(own.trained, 1)
    state: float
    if plan.shard == "parameters":
        share, state = _bytes(own.trained, parts), _optimizer(own, parts)
        updated = max(_update(own, run, parts=parts), min(_SUMMED_AT_ONCE, share) if plan.tensor > 1 else 0)
    elif plan.shard == "optimizer":
        # Whole gradients are dropped while they are summed, before the optimizer's step: each unit of them is copied,
        # and so is its sum.
        share, updated = math.ceil(gradients / replicas), 2 * min(_SUMMED_AT_ONCE, gradients)
        state = sum(p.state_bytes / replicas + p.other_state_bytes for p in own.trained)
    else:
        share, state = 0, _optimizer(own, 1)
        # With replicas all gradients are copied into one tensor to be summed; those of split layers one by one.
        copied = gradients if replicas > 1 else 0
        updated = max(
            _update(own, run, parts=1), min(_SUMMED_AT_ONCE, gradients) if plan.tensor > 1 else copied
        )
    sharded = plan.shard == "parameters"
    parameters = _bytes(own.parameters, parts)
    # Layers are split before those of other stages are released; then what is left is sharded.
    split, left = (model.part(plan.tensor).num_bytes, own.num_bytes) if plan.tensor > 1 else (0, 0)
    # FSDP2 holds the stage whole in a step, besides the parts, and copies a block's gradients to sum them.
    return Needs(
        parameters=parameters,
        gradients=gradients + share,
        optimizer=math.ceil(state),
        buffers=model.buffer_bytes,
        gathered=own.num_bytes if sharded else 0,
        gathered_gradients=max((grads for _, grads in own.blocks().values()), default=0) if sharded else 0,
        data=_data(plan, run),
        snapshot=_snapshot(model, run),
        update=updated,
        start=_start(model, parts=max(split, left + parameters if sharded else 0)),
        activations=found,
        sent=sent_in_a_step(plan, model, run, micro_batches=micro_batches),
    )


def _activations(
    plan: ParallelPlan, model: ModelSizes, run: RunSizes, *, samples: int
) -> tuple[int | None, int]:
    """Returns the bytes of activations at the start and at the end of backward; the former is None if not measured."""
    found = run.measured.activation_bytes(plan, samples=samples)
    num_blocks = len(model.blocks().keys() - {""})
    return found, (found or 0) // (num_blocks + 1)


def _bytes(parameters: Sequence[ParameterSize], num_parts: int) -> int:
    return math.ceil(sum(p.num_bytes * p.share(num_parts) for p in parameters))


def _optimizer(model: ModelSizes, parts: int) -> int:
    return math.ceil(sum(p.state_bytes * p.share(parts) + p.other_state_bytes for p in model.trained))


def _start(model: ModelSizes, *, parts: int = 0) -> int:
    """Returns the peak bytes at the start of a run, while each rank holds the whole model.

    In addition to the model, a rank holds either `parts`, the bytes of the parts that are made from the model, or
    copies of the parameters that rank 0 sends. The larger of the two counts.
    """
    largest = max((p.num_bytes for p in model.parameters), default=0)
    copies = min(model.num_bytes, max(largest, MESSAGE_BYTES))
    return model.num_bytes + model.buffer_bytes + max(parts, copies)


def _update(model: ModelSizes, run: RunSizes, *, parts: int) -> int:
    """Returns the temporary bytes of the optimizer's step: Adam's denominator, a square root and a quotient."""
    if run.update_at_once:
        return _bytes(model.trained, parts)
    return 2 * max((math.ceil(p.num_bytes * p.share(parts)) for p in model.trained), default=0)


def _data(plan: ParallelPlan, run: RunSizes) -> int:
    if run.loader is None:
        return 0
    together = plan.tensor * plan.pipeline
    return run.loader.held(
        samples=run.samples(ranks_of_a_sample=together), data_ranks=run.topology.num_ranks // together
    )


def _snapshot(model: ModelSizes, run: RunSizes) -> int:
    # Each rank writes its share of the state, also where all have the same.
    return math.ceil(model.state_bytes / run.topology.num_ranks) if run.snapshot else 0


def _whole_blocks(model: ModelSizes) -> tuple[int, int]:
    """Returns the peak bytes of parameters, and of gradients, that FSDP2 holds whole in backward.

    Parameters outside blocks stay whole from forward on, and get their gradients until backward ends. While FSDP2
    computes a block, it holds the parameters and gradients of the block, the parameters of the next block, and the
    buffer in which it sends the gradients of the block before.
    """
    blocks = model.blocks()
    rest, rest_trained = blocks.pop("", (0, 0))
    if not blocks:
        return rest, max(rest, rest_trained)
    largest = max(whole for whole, _ in blocks.values())
    return rest + 3 * largest, rest_trained + max(trained for _, trained in blocks.values())
