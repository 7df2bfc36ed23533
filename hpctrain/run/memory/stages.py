"""What the stages of a pipeline keep between forward and backward. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.distributed import ParallelPlan
from hpctrain.run.memory.sizes import LayerActivations, StageSizes


def stage_activations(
    plan: ParallelPlan,
    stages: StageSizes,
    layers: LayerActivations,
    *,
    place: int,
    samples: int,
    micro_batches: int,
) -> int:
    """Returns the bytes that a rank of a pipeline has at once besides parameters and gradients.

    place: of the rank, whose first stage has this number. samples: of a micro-batch. Forward of a micro-batch keeps
    what its stage needs for backward, and for each micro-batch PyTorch has memory for what arrives: activations from
    the stage before, and gradients from the one after.
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
    """Returns of how many micro-batches, times stages of the rank, forward has run and backward has not, at most.

    As in the schedules of torch.distributed.pipelining: the forwards before the first backward, and one more.
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
    """Returns the bytes for one sample that each stage but the last gives to the next one."""
    return [layers.output_bytes[of_stage[-1]] for of_stage in stages.layers[:-1]]


def _arriving(plan: ParallelPlan, stages: StageSizes, layers: LayerActivations, *, place: int) -> float:
    """Returns the bytes for one sample that the rank receives."""
    between = boundary_bytes(stages, layers)
    numbers: Sequence[int] = range(place, len(stages.layers), plan.pipeline)
    found = 0.0
    for number in numbers:
        found += between[number - 1] if number > 0 else 0.0
        found += between[number] if number < len(between) else 0.0
    return found
