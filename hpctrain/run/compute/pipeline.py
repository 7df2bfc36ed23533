"""Divides the model of a run into pipeline stages, by the layers that the task names."""

from __future__ import annotations

from functools import partial

import torch

from hpctrain.comm import World, agreed
from hpctrain.distributed import ParallelPlan, pipeline_of, put_in_pipeline
from hpctrain.errors import UsageError
from hpctrain.topology import Topology
from hpctrain.train import Task


def put_in_stages(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: ParallelPlan,
    *,
    task: Task,
    world: World,
    topology: Topology,
    device: torch.device,
    timeout_s: float,
) -> bool:
    """Reduces `model` and `optimizer`, in place, to this rank's pipeline stages. Collective.

    The task's method `pipeline_layers` returns the layers. The other arguments and the result are those of
    `put_in_pipeline`.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    opens = put_in_pipeline(
        model, plan, layers=partial(layers_of, task, model), world=world, topology=topology, device=device,
        timeout_s=timeout_s,
    )  # fmt: skip
    pipeline = pipeline_of(model)
    assert pipeline is not None
    agreed(world, lambda: pipeline.keep_own(optimizer, names=names), os_error=UsageError)
    return opens


def layers_of(task: Task, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers of `model`, in order, from the task's `pipeline_layers`.

    Raises UsageError if the task has no such method or the method fails.
    """
    method = getattr(task, "pipeline_layers", None)
    if not callable(method):
        raise UsageError(
            "a pipeline needs to know the model's layers: give the task a method pipeline_layers(self, model), which "
            "returns the modules that the model calls one after another, such as "
            "[model.embedding, *model.blocks, model.head]; together they have all of its parameters"
        )
    try:
        return list(method(model))
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"the task's pipeline_layers raised {type(error).__name__}: {error}") from error
