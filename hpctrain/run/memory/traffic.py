"""What a rank sends in a step for each way to split a model. Pure."""

from __future__ import annotations

import math

from hpctrain.distributed import ParallelPlan
from hpctrain.reduce import Sent, all_sent, gathered_in_a_ring, sharded_sum
from hpctrain.run.memory.sizes import ModelSizes, RunSizes, StageSizes
from hpctrain.run.memory.stages import boundary_bytes
from hpctrain.topology import ParallelMesh

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
        ranks = ParallelMesh.plan(run.topology, tensor=plan.tensor).data_ranks()
        gradients = sum(p.num_bytes for p in model.part(plan.tensor).trained)
        summed = gathered_in_a_ring(2 * gradients, ranks=ranks, topology=run.topology)
        return all_sent(summed, _within_tensor_groups(plan, model, run))
    reduction = run.reductions[plan.shard]
    return Sent(reduction.sent, reduction.sent_between_nodes)


def _of_shards(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Sharded parameters, in a micro-batch.

    Blocks are gathered in forward and, but for the last one, in backward, and the rest in forward; all gradients are
    reduced.
    """
    topology, local = run.topology, model.part(plan.tensor)
    mesh = ParallelMesh.plan(topology, tensor=plan.tensor)
    blocks = local.blocks()
    rest, _ = blocks.pop("", (0, 0))
    sizes = [size for size, _ in blocks.values()]
    whole = rest + 2 * sum(sizes) - sum(sizes[-1:])
    gradients = sum(p.num_bytes for p in local.trained)
    within_node = plan.shard_within == "node"
    ranks = mesh.data_grid()[0] if within_node else mesh.data_ranks()
    gathered = gathered_in_a_ring(whole, ranks=ranks, topology=topology)
    if plan.tensor == 1:
        algorithm, wire = run.sharded_sum
        itemsize = max((p.itemsize for p in local.trained), default=4)
        summed = sharded_sum(
            gradients, algorithm=algorithm, wire=wire, within=plan.shard_within, topology=topology,
            itemsize=itemsize,
        )  # fmt: skip
        return all_sent(gathered, summed)
    summed = gathered_in_a_ring(gradients, ranks=ranks, topology=topology)
    if within_node:
        across = [node[0] for node in mesh.data_grid()]
        summed = all_sent(
            summed, gathered_in_a_ring(2 * gradients / len(ranks), ranks=across, topology=topology)
        )
    return all_sent(gathered, summed)


def _within_tensor_groups(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Activations of a step, and the gradients of what every rank of a group holds. A group lies on one node."""
    tensor = plan.tensor
    if tensor == 1:
        return NOTHING
    alike = sum(p.num_bytes for p in model.trained if p.tensor_dim is None)
    if plan.shard == "parameters":
        alike //= run.topology.num_ranks // tensor
    summed = float(alike)
    messages = run.measured.messages
    if messages is not None:
        again = messages.in_blocks if plan.activation_checkpointing != "none" else 0.0
        samples = run.samples(ranks_of_a_sample=tensor)
        summed += samples * (messages.forward + again + messages.backward)
    return Sent(2 * summed * (tensor - 1) / tensor, 0.0)


def _of_pipeline(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Sent:
    """Activations and their gradients between stages, and the sum of the gradients over the replicas; of a sharded
    optimizer to their owners, who send as many bytes of parameters."""
    topology = run.topology
    mesh = ParallelMesh.plan(topology, pipeline=plan.pipeline)
    stages = run.stages[plan.pipeline * plan.stages_per_rank]
    found = []
    for place in range(plan.pipeline):
        gradients = sum(
            p.num_bytes for p in model.trained if stages.stage_of[p.name] % plan.pipeline == place
        )
        found.append(gathered_in_a_ring(2 * gradients, ranks=mesh.data_ranks(stage=place), topology=topology))
    summed = all_sent(*found).times(1 / plan.pipeline)
    return all_sent(summed, _between_stages(plan, stages, run, mesh=mesh))


def _between_stages(plan: ParallelPlan, stages: StageSizes, run: RunSizes, *, mesh: ParallelMesh) -> Sent:
    layers = run.measured.layers.get(plan.activation_checkpointing)
    if layers is None:
        return NOTHING
    samples = run.samples(ranks_of_a_sample=plan.pipeline)
    total = far = 0.0
    pipelines = [mesh.pipeline_axis(rank).ranks for rank in mesh.data_ranks()]
    for number, num_bytes in enumerate(boundary_bytes(stages, layers)):
        both = 2 * samples * num_bytes  # there, and its gradient back
        for ranks in pipelines:
            nodes = {run.topology.node_of(ranks[n % plan.pipeline]) for n in (number, number + 1)}
            total += both
            far += both if len(nodes) > 1 else 0.0
    num_ranks = run.topology.num_ranks
    return Sent(math.ceil(total / num_ranks), math.ceil(far / num_ranks))
