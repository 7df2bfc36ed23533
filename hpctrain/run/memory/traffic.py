"""What a rank sends in a step for each way to split a model. Pure."""

from __future__ import annotations

import math

from hpctrain.distributed import ParallelPlan
from hpctrain.reduce import Sent, all_sent, sharded_sum
from hpctrain.run.memory.sizes import ModelSizes, RunSizes, StageSizes
from hpctrain.run.memory.stages import boundary_bytes

NOTHING = Sent(0.0, 0.0)


def sent_in_a_step(plan: ParallelPlan, model: ModelSizes, run: RunSizes, *, micro_batches: int) -> Sent:
    """Returns the bytes that a rank sends, the mean of the ranks. Unmeasured activations count as nothing."""
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
    """Sharded parameters, in a micro-batch.

    Blocks are gathered in forward and, but for the last one, in backward, and the rest in forward; all gradients are
    reduced.
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
    """Parameters gathered over the ranks that share them, and gradients summed to their owners, as FSDP2 does."""
    within_node = plan.shard_within == "node"
    found = run.groups.ring(plan, place=place, within=within_node).times(parameters + gradients)
    if within_node:
        # Each owner has a part of its node's sum.
        part = 2 * gradients / run.groups.num_parts(plan)
        found = all_sent(found, run.groups.ring(plan, place=place, across=True).times(part))
    return found


def _within_tensor_groups(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Activations of a step, and the gradients of what every rank of a group holds. A group lies on one node."""
    tensor = plan.tensor
    if tensor == 1:
        return NOTHING
    alike = sum(p.num_bytes for p in model.trained if p.tensor_dim is None)
    averaged = alike / run.groups.num_data_ranks(plan) if plan.shard == "parameters" else alike
    # What was computed on parts of the sequence is summed before it is averaged.
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
    """Activations and their gradients between stages, and the sum of the gradients over the replicas; of a sharded
    optimizer to their owners, who send as many bytes of parameters. Sharded parameters are gathered once."""
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
