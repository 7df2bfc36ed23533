"""Calculates, for a recipe and a number of ranks, what each way to split the model needs. Does not communicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hpctrain.data import Batch, Dataset, Loader, Sequential
from hpctrain.distributed import Checkpointing, ParallelPlan, check_plan
from hpctrain.errors import HpctrainError, RecipeError
from hpctrain.reduce import (
    AUTO,
    DEFAULT_BUCKET_BYTES,
    NCCL_ALGORITHMS,
    Algorithm,
    Means,
    ReductionNeeds,
    describe_gradient,
    parse_algorithm,
    plan_buckets,
    reduction_needs,
)
from hpctrain.run.build import build_model, reduction_plan
from hpctrain.run.compute.precision import MODEL_DTYPE, autocast_for
from hpctrain.run.memory.choice import Fit, Way, first_that_fits
from hpctrain.run.memory.measure_activations import measure_activations
from hpctrain.run.memory.measure_model import count_model, model_on_meta
from hpctrain.run.memory.needs import (
    Activations,
    ModelSizes,
    RunSizes,
    line_through,
    needs_of,
    ways_to_split,
)
from hpctrain.run.recipe.load import parse_recipe
from hpctrain.run.recipe.schema import Recipe, ReductionSection
from hpctrain.topology import ParallelMesh, Topology
from hpctrain.train import Task, TaskRunner, derive_seed, import_task, seed_generators

_CPU = torch.device("cpu")
# Samples of the largest micro-batch that is measured, unless the recipe's is smaller; at least the first number, since
# batch normalisation needs some.
_LEAST_SAMPLES, _MOST_SAMPLES = 4, 32
# Model and gradients, while activations are measured.
_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All ways to split a recipe's model, in the order in which to try them.

    device: `cpu` or `cuda`, where the run would train. memory: bytes that each rank has; None if it was not said.
    chosen: the first way that fits; None if none does. notes: what was not measured, or assumed.
    """

    topology: Topology
    device: str
    model: ModelSizes
    run: RunSizes
    ways: tuple[Way, ...]
    memory: int | None
    chosen: Fit | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """Of the training data: bytes of a sample as the task gets it, the first samples, and what a loader holds ready."""

    sample_bytes: int
    first: Batch
    held_bytes: int


def plan_memory(
    recipe: Recipe,
    *,
    recipe_path: Path,
    num_ranks: int,
    ranks_per_node: int | None = None,
    memory: int | None = None,
) -> MemoryPlan:
    """Returns what each way to split the recipe's model needs on `num_ranks` ranks.

    The model is counted on the meta device. Activations are measured with it on this process's CPU, with training data,
    if both are there. ranks_per_node: absent, that of the section [slurm] if it is set there, else all on one node.
    memory: bytes of a rank. Raises RecipeError if the recipe's task, model or optimizer cannot be made, or a rank would
    have no samples.
    """
    if recipe.data.global_batch < num_ranks:
        raise RecipeError(
            f"data.global_batch = {recipe.data.global_batch} cannot be split over {num_ranks} ranks: every rank needs "
            f"at least one sample. Set data.global_batch to {num_ranks} or more, or use fewer ranks"
        )
    notes: list[str] = []
    topology = _topology(recipe, num_ranks, ranks_per_node)
    on_gpu = _on_gpu(recipe)
    search = [Path.cwd(), recipe_path.absolute().parent]

    def make_task() -> Task:
        return import_task(recipe.task.target, options=recipe.task.options, search=search)

    model = model_on_meta(recipe, make_task, note=notes.append)
    sizes = count_model(model, recipe.optimizer, note=notes.append)
    samples = math.ceil(recipe.data.global_batch / num_ranks)
    micro_batch = math.ceil(samples / recipe.data.micro_batches)
    data = _data_of(recipe, samples=samples, micro_batch=micro_batch, num_ranks=num_ranks, notes=notes)
    measured: Mapping[Checkpointing, Mapping[int, int]] = {}
    if data is not None:
        saves = _why_not(recipe, ParallelPlan(activation_checkpointing="blocks"), model, topology) == ""
        measured = _measured(recipe, make_task, data, sizes=sizes, saves=saves, notes=notes)
    besides = data.sample_bytes if data is not None and on_gpu else 0
    activations: dict[Checkpointing, Activations] = {
        way: line_through(found, besides=besides) for way, found in measured.items()
    }
    host_bytes = data.held_bytes if data is not None else int(recipe.data.prefetch_mb * 1e6)
    run = RunSizes(
        topology=topology,
        samples=samples,
        micro_batches=recipe.data.micro_batches,
        reduction=_reduction(recipe, model, topology, on_gpu=on_gpu),
        activations=activations,
        data_bytes=0 if on_gpu else host_bytes,
        snapshot=not on_gpu and recipe.checkpoint.mode == "async",
        update_at_once=on_gpu,
    )
    ways = tuple(_way(recipe, plan, model, sizes, run) for plan in ways_to_split(topology))
    return MemoryPlan(
        topology=topology,
        device="cuda" if on_gpu else "cpu",
        model=sizes,
        run=run,
        ways=ways,
        memory=memory,
        chosen=first_that_fits(ways, run, memory=memory) if memory is not None else None,
        notes=tuple(notes),
    )


def _topology(recipe: Recipe, num_ranks: int, ranks_per_node: int | None) -> Topology:
    slurm = recipe.slurm
    if ranks_per_node is None:
        ranks_per_node = slurm.tasks_per_node if "tasks_per_node" in slurm.model_fields_set else num_ranks
    return Topology.from_node_names([f"node {rank // ranks_per_node}" for rank in range(num_ranks)])


def _on_gpu(recipe: Recipe) -> bool:
    device = recipe.run.device
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _reduction(recipe: Recipe, model: torch.nn.Module, topology: Topology, *, on_gpu: bool) -> ReductionNeeds:
    asked = reduction_plan(recipe)
    trained = [p for p in model.parameters() if p.requires_grad]
    buckets = plan_buckets(
        [describe_gradient(p) for p in trained], bucket_bytes=asked.bucket_bytes or DEFAULT_BUCKET_BYTES
    )
    usual = Algorithm.FLAT if on_gpu else Algorithm.HIERARCHICAL
    algorithm = usual if asked.algorithm == AUTO else parse_algorithm(asked.algorithm)
    means = Means(
        backend="mpi", topology=topology, messages=True, device="cuda" if on_gpu else "cpu",
        nccl=algorithm if on_gpu and algorithm in NCCL_ALGORITHMS else None,
    )  # fmt: skip
    wire = "fp32" if asked.wire == AUTO else asked.wire
    return reduction_needs(buckets, algorithm=algorithm, wire=wire, means=means)


def _way(recipe: Recipe, plan: ParallelPlan, model: torch.nn.Module, sizes: ModelSizes, run: RunSizes) -> Way:
    refused = _why_not(recipe, plan, model, run.topology)
    if refused:
        return Way(plan=plan, refused=refused)
    drops = plan.shard != "none" and recipe.reduction != ReductionSection()
    return Way(plan=plan, needs=needs_of(plan, sizes, run), drops_reduction=drops)


def _why_not(recipe: Recipe, plan: ParallelPlan, model: torch.nn.Module, topology: Topology) -> str:
    """Returns why a run of the recipe with `plan` would be refused; empty if it would not."""
    document = recipe.model_dump(exclude_unset=True)
    usual = ParallelPlan()
    given = {key: getattr(plan, key) for key in ("shard", "shard_within", "activation_checkpointing")}
    document["parallel"] = {key: value for key, value in given.items() if value != getattr(usual, key)}
    if plan.shard != "none":
        document.pop("reduction", None)
    try:
        parse_recipe(document)
        check_plan(model, plan)
        if plan.shard_within == "node":
            ParallelMesh.plan(topology).data_grid()
    except HpctrainError as error:
        return str(error).rpartition("\n")[2].strip().removeprefix("recipe: ")
    return ""


def _data_of(
    recipe: Recipe, *, samples: int, micro_batch: int, num_ranks: int, notes: list[str]
) -> _Data | None:
    """Reads the first samples of the training data. Returns None, with a note, if that fails."""
    section = recipe.data
    try:
        io = "auto" if section.io == "collective" else section.io
        dataset = Dataset.open(section.train, verify="off", io=io)
        wanted = min(max(micro_batch, _LEAST_SAMPLES), _MOST_SAMPLES, dataset.num_samples)
        loader = Loader(
            dataset, global_batch=wanted, order=Sequential(), transform=section.transform, prefetch_bytes=1
        )
        with loader.epoch(0) as batches:
            first = next(batches)
    except Exception as error:  # the user's transform may raise anything
        notes.append(
            f"activations were not measured and count as nothing, since no training data can be read: {error}"
        )
        return None
    sample_bytes = math.ceil(first.num_bytes / first.num_samples)
    of_epoch = math.ceil(dataset.num_samples / num_ranks) * sample_bytes
    held = min(int(section.prefetch_mb * 1e6), of_epoch) + samples * sample_bytes
    decoded = any(
        stored.offset is None for shard in dataset.manifest.shards for stored in shard.fields.values()
    )
    if decoded:
        held += dataset.cache_bytes if section.cache_mb is None else int(section.cache_mb * 1e6)
    return _Data(sample_bytes=sample_bytes, first=first, held_bytes=held)


def _measured(
    recipe: Recipe,
    make_task: Callable[[], Task],
    data: _Data,
    *,
    sizes: ModelSizes,
    saves: bool,
    notes: list[str],
) -> Mapping[Checkpointing, Mapping[int, int]]:
    """Returns bytes of activations by activation checkpointing and samples; empty, with a note, if that fails.

    saves: whether the model's blocks can be checkpointed.
    """
    free = psutil.virtual_memory().available
    model_bytes = _COPIES * sum(p.num_bytes for p in sizes.parameters) + sizes.buffer_bytes
    if model_bytes > free:
        notes.append(
            f"activations were not measured and count as nothing: model and gradients take {model_bytes / 1e9:.3g} GB, "
            f"of which this machine has {free / 1e9:.3g} GB free"
        )
        return {}
    try:
        seed_generators(derive_seed(recipe.run.seed, "model"))
        task = make_task()
        runner = TaskRunner(
            task, build_model(recipe, task, device=_CPU), device=_CPU,
            dtype=MODEL_DTYPE[recipe.run.precision], autocast=autocast_for(recipe.run.precision, device=_CPU),
        )  # fmt: skip
        ways: list[Checkpointing] = ["none", "blocks"] if saves else ["none"]
        return measure_activations(runner, data.first, ways=ways, memory=free - model_bytes)
    except Exception as error:  # the user's model may raise anything
        notes.append(
            "activations were not measured and count as nothing, since the model does not train on this machine's CPU: "
            f"{type(error).__name__}: {error}"
        )
        return {}
