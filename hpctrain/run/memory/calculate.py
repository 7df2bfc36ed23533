"""Calculates the memory of each way to split a recipe's model over a number of ranks. Does not communicate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from hpctrain.distributed import ParallelPlan, Recomputation, ShardKind, TensorPlan
from hpctrain.errors import RecipeError
from hpctrain.reduce import (
    AUTO,
    DEFAULT_BUCKET_BYTES,
    NCCL_ALGORITHMS,
    SHARDED_ALGORITHMS,
    Algorithm,
    Capabilities,
    ReductionNeeds,
    describe_gradient,
    encodes_every_value,
    parse_algorithm,
    plan_buckets,
    reduction_needs,
    scatter_needs,
)
from hpctrain.run.build import reduction_plan, tensor_plan_of
from hpctrain.run.compute.pipeline import layers_of
from hpctrain.run.memory.forward_backward import measure_forward_backward
from hpctrain.run.memory.layouts import (
    COMPUTED_AGAIN,
    FAMILY_KEYS,
    family_of,
    is_same_way,
    layout_name,
    waiting,
    ways_to_split,
    with_micro_batches,
)
from hpctrain.run.memory.measured_model import TrainingData, count_model, model_on_meta, read_training_data
from hpctrain.run.memory.needs import Needs, needs_of
from hpctrain.run.memory.refusals import Judge, Verdict
from hpctrain.run.memory.sizes import (
    LoaderSizes,
    Measured,
    ModelSizes,
    RankGroups,
    RunSizes,
    in_decimal_units,
)
from hpctrain.run.recipe.schema import Recipe
from hpctrain.topology import Topology
from hpctrain.train import Task, TensorParallelTask, import_task

# Chooses among the ways to split a model: which fits, and what to write into the recipe. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to split the model over the ranks.

    Attributes:
        choices: The numbers of micro-batches to try, ascending; the first number is used unless memory is short. Empty
            if a run would refuse this way to split; `refused` then says why.
        needs: A function that takes a number of micro-batches and returns what a rank needs; None if refused.
        drops_reduction: Whether the recipe's section [reduction] must be removed to use this way.
        is_current: Whether the recipe uses this way now.
    """

    plan: ParallelPlan
    choices: Sequence[int] = ()
    needs: Callable[[int], Needs] | None = None
    refused: str = ""
    drops_reduction: bool = False
    is_current: bool = False

    @property
    def name(self) -> str:
        return layout_name(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMemory:
    """A way to split the model, a number of micro-batches, and the memory that a rank then needs."""

    way: Way
    micro_batches: int
    needs: Needs

    @property
    def plan(self) -> ParallelPlan:
        return with_micro_batches(self.way.plan, self.micro_batches)

    @property
    def waiting(self) -> float:
        """The fraction of a step in which a pipeline rank waits; an upper bound for `zero-bubble`."""
        return waiting(self.way.plan, micro_batches=self.micro_batches)


def usual_fit(way: Way) -> LayoutMemory | None:
    """Returns a way to split the model with its first number of micro-batches; None if a run would refuse this way."""
    if way.needs is None or not way.choices:
        return None
    return LayoutMemory(way=way, micro_batches=way.choices[0], needs=way.needs(way.choices[0]))


def fit_of(way: Way, *, memory: int) -> LayoutMemory | None:
    """Returns a way to split the model with the fewest micro-batches with which it fits into `memory` bytes.

    Returns None if no number in `way.choices` fits, or if a run would refuse this way.
    """
    usual, needs = usual_fit(way), way.needs
    if usual is None or needs is None or usual.needs.total <= memory:
        return usual
    # From the second choice on, more micro-batches never need more memory.
    others = way.choices[1:]
    place = bisect_left(others, True, key=lambda parts: needs(parts).total <= memory)
    if place == len(others):
        return None
    return LayoutMemory(way=way, micro_batches=others[place], needs=needs(others[place]))


def first_that_fits(ways: Iterable[Way], *, memory: int) -> LayoutMemory | None:
    """Returns the first way to split the model that fits into `memory` bytes, with more micro-batches if necessary.

    Returns None if no way fits.
    """
    fits = (fit_of(way, memory=memory) for way in ways)
    return next((fit for fit in fits if fit is not None), None)


def best_of_families(ways: Iterable[Way], *, memory: int | None) -> list[Way]:
    """Returns one way per family; ways of one family differ only in activation checkpointing and schedule.

    A way is a way to split the model over the ranks. The result has the first way of a family that fits into `memory`
    bytes or, if no way fits, the way that needs least. If `memory` is None, the result has the first way that is not
    refused. The recipe's own way is always included too.
    """
    families: dict[tuple[object, ...], list[Way]] = {}
    for way in ways:
        families.setdefault(family_of(way.plan), []).append(way)
    found = []
    for family in families.values():
        best = _best(family, memory=memory)
        found += [way for way in family if way is best or way.is_current]
    return found


def _best(ways: Sequence[Way], *, memory: int | None) -> Way:
    usual = [fit for way in ways if (fit := usual_fit(way)) is not None]
    if not usual:
        return ways[0]
    if memory is None:
        return usual[0].way
    chosen = first_that_fits(ways, memory=memory)
    return chosen.way if chosen is not None else min(usual, key=_least).way


def _least(fit: LayoutMemory) -> int:
    assert fit.way.needs is not None
    return fit.way.needs(fit.way.choices[-1]).total


def describe_cost(fit: LayoutMemory) -> str:
    """Returns text about the costs of a way to split besides communication: `computes a third more; waits 27 %`."""
    plan, costs = fit.way.plan, []
    again = COMPUTED_AGAIN[plan.activation_checkpointing]
    if again is None:
        costs.append("computes a little more")
    elif again and plan.schedule == "zero-bubble":
        # Its backward is one for the inputs and one for each group of weights, and each computes the block's forward.
        costs.append("computes blocks several times")
    elif again:
        costs.append("computes a third more")
    if plan.offload:
        costs.append(f"copies from {in_decimal_units(fit.needs.host)} in host memory")
    if fit.waiting:
        less = "less than " if plan.schedule == "zero-bubble" else ""
        costs.append(f"waits {less}{fit.waiting:.0%}")
    return "; ".join(costs)


def recipe_lines(fit: LayoutMemory, *, micro_batches: int) -> list[str]:
    """Returns the lines to write into the recipe; [] if neither [parallel] nor other micro-batches are needed.

    micro_batches: the number in the recipe's section [data].
    """
    plan, usual, lines = fit.plan, ParallelPlan(), []
    for key in (*FAMILY_KEYS, "schedule", "micro_batches", "activation_checkpointing"):
        value = getattr(plan, key)
        if value != getattr(usual, key) or (key == "schedule" and plan.pipeline > 1):
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}".lower())
    if lines:
        lines.insert(0, "[parallel]")
    of_data = 1 if plan.pipeline > 1 else fit.micro_batches
    if of_data != micro_batches:
        lines += ["[data]", f"micro_batches = {of_data}"]
    return lines


# Calculates, for a recipe and a number of ranks, what each way to split the model needs.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimates:
    """All ways to split a recipe's model over the ranks, in the order in which to try them.

    Attributes:
        device: `cpu` or `cuda`, where the run would train.
        own: The recipe's own plan, which is one of the ways.
        memory: The bytes of memory that each rank may use; None if unknown.
        chosen: The first way that fits; None if no way fits.
        notes: What was assumed or could not be measured.
    """

    topology: Topology
    device: str
    own: ParallelPlan
    model: ModelSizes
    run: RunSizes
    ways: tuple[Way, ...]
    memory: int | None
    chosen: LayoutMemory | None
    notes: tuple[str, ...]


def plan_memory(
    recipe: Recipe,
    *,
    recipe_path: Path,
    num_ranks: int,
    ranks_per_node: int | None = None,
    memory: int | None = None,
) -> MemoryEstimates:
    """Returns the memory that each way to split the recipe's model needs on `num_ranks` ranks.

    Parameters are counted on the meta device. Activations are measured on this process's CPU with training data, if
    that is possible.

    ranks_per_node: if None, `slurm.tasks_per_node` of the recipe counts; if that is not set, all ranks are on one node.
    memory: the bytes of memory that each rank may use; None if unknown.

    Raises RecipeError if the recipe's task, model or optimizer cannot be created, or if a run would refuse every way.
    """
    notes: list[str] = []
    topology = _topology(recipe, num_ranks, ranks_per_node)
    on_gpu = _on_gpu(recipe)
    search = [Path.cwd(), recipe_path.absolute().parent]

    def make_task() -> Task:
        return import_task(recipe.task.target, options=recipe.task.options, search=search)

    task = make_task()
    model = model_on_meta(recipe, lambda: task, note=notes.append)
    tensor_plan = _tensor_plan(task, note=notes.append)
    in_stages = callable(getattr(task, "pipeline_layers", None))
    own, no_tensor_plan = _own_plan(recipe, task, tensor_plan)
    judge = Judge(
        recipe=recipe, model=model, topology=topology, groups=RankGroups(topology), own=own, on_gpu=on_gpu,
        layers=partial(layers_of, task, model),
    )  # fmt: skip
    plans = ways_to_split(
        topology, tensor_plan=tensor_plan, in_stages=in_stages,
        stages_of_parts=judge.stages_of_parts(tensor_plan) if in_stages else (), offload=on_gpu,
    )  # fmt: skip
    if not any(is_same_way(plan, own) for plan in plans):
        plans.append(own)
    verdicts = [
        Verdict(refused=no_tensor_plan) if no_tensor_plan and plan is own else judge.judge(plan)
        for plan in plans
    ]
    _check_some(verdicts)
    # A plan that a run refuses for any number of ranks may be one whose memory cannot be calculated.
    allowed = [plan for plan, verdict in zip(plans, verdicts, strict=True) if not verdict.refused]
    splits = any(plan.tensor > 1 for plan in allowed)
    sizes = count_model(
        model, recipe.optimizer, tensor_plan=tensor_plan if splits else None, note=notes.append
    )
    data = _data_of(recipe, topology, note=notes.append)
    measured = Measured()
    if data is not None:
        measured = measure_forward_backward(
            recipe, make_task, data.first, sizes=sizes, savings=_savings(judge), plans=allowed,
            besides=data.loader.sample_bytes if on_gpu else 0, note=notes.append,
        )  # fmt: skip
    absent = LoaderSizes(prefetch_bytes=int(recipe.data.prefetch_mb * 1e6))
    run = RunSizes(
        averages=recipe.optimizer.ema is not None,
        topology=topology,
        global_batch=recipe.data.global_batch,
        micro_batches=recipe.data.micro_batches,
        reductions=_reductions(recipe, model, topology, on_gpu=on_gpu),
        sharded_sum=_sharded_sum(recipe, on_gpu=on_gpu),
        measured=measured,
        stages=judge.stages,
        loader=None if on_gpu else data.loader if data is not None else absent,
        snapshot=not on_gpu and recipe.checkpoint.mode == "async",
        update_at_once=on_gpu,
    )
    ways = tuple(_way(plan, verdict, own, sizes, run) for plan, verdict in zip(plans, verdicts, strict=True))
    return MemoryEstimates(
        own=own,
        topology=topology,
        device="cuda" if on_gpu else "cpu",
        model=sizes,
        run=run,
        ways=ways,
        memory=memory,
        chosen=first_that_fits(ways, memory=memory) if memory is not None else None,
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


def _tensor_plan(task: Task, *, note: Callable[[str], None]) -> TensorPlan:
    """Returns the task's plan for splitting its layers; {} if the task has no plan."""
    if not isinstance(task, TensorParallelTask):
        return {}
    try:
        return dict(task.tensor_plan())
    except Exception as error:  # the user's code may raise anything
        note(
            f"ways with split layers are left out: the task's tensor_plan raised {type(error).__name__}: {error}"
        )
        return {}


def _own_plan(recipe: Recipe, task: Task, tensor_plan: TensorPlan) -> tuple[ParallelPlan, str]:
    """Returns the recipe's own plan and, if it splits layers but the task has no tensor plan, a text that says so.

    Otherwise the text is empty.
    """
    keys, reason = recipe.parallel.model_dump(), ""
    if recipe.parallel.tensor > 1 and not tensor_plan:
        try:
            tensor_plan_of(recipe, task)
        except RecipeError as error:
            reason = str(error)
        tensor_plan = {"*": "column"}  # a placeholder that is never read
    return ParallelPlan(**keys, tensor_plan=tensor_plan if recipe.parallel.tensor > 1 else {}), reason


def _check_some(verdicts: Sequence[Verdict]) -> None:
    """Raises RecipeError, with the reason for the first way, if a run would refuse all ways to split the model."""
    if all(verdict.refused for verdict in verdicts):
        raise RecipeError(verdicts[0].refused)


def _savings(judge: Judge) -> list[Recomputation]:
    """Returns the kinds of activation checkpointing that the model supports."""
    return [
        saving
        for saving in get_args(Recomputation)
        if saving == "none" or not judge.of_model(ParallelPlan(activation_checkpointing=saving))
    ]


def _data_of(recipe: Recipe, topology: Topology, *, note: Callable[[str], None]) -> TrainingData | None:
    samples = -(-recipe.data.global_batch // topology.num_ranks)
    return read_training_data(recipe, micro_batch=-(-samples // recipe.data.micro_batches), note=note)


def _reductions(
    recipe: Recipe, model: torch.nn.Module, topology: Topology, *, on_gpu: bool
) -> Mapping[ShardKind, ReductionNeeds]:
    """Returns the memory and traffic of gradient reductions other than FSDP2's, by what is sharded.

    Settings of the recipe that a run would refuse are replaced by the usual settings.
    """
    asked = reduction_plan(recipe)
    trained = [p for p in model.parameters() if p.requires_grad]
    bucket_bytes = asked.bucket_bytes or DEFAULT_BUCKET_BYTES
    buckets = plan_buckets([describe_gradient(p) for p in trained], bucket_bytes=bucket_bytes)
    usual = Algorithm.FLAT if on_gpu else Algorithm.HIERARCHICAL
    algorithm = usual if asked.algorithm == AUTO else parse_algorithm(asked.algorithm)
    capabilities = Capabilities(
        backend="mpi", topology=topology, messages=True, device="cuda" if on_gpu else "cpu",
        nccl=algorithm if on_gpu and algorithm in NCCL_ALGORITHMS else None,
    )  # fmt: skip
    wire = "fp32" if asked.wire == AUTO else asked.wire
    found: dict[ShardKind, ReductionNeeds] = {
        "none": reduction_needs(buckets, algorithm=algorithm, wire=wire, capabilities=capabilities)
    }
    kinds: tuple[ShardKind, ShardKind] = ("optimizer", "gradients")
    for shard in kinds:
        found[shard] = scatter_needs(
            buckets, keeps_gradients=shard == "optimizer", parameter_bytes=sum(p.nbytes for p in trained),
            algorithm=asked.algorithm, wire=wire if encodes_every_value(wire) else "fp32", bucket_bytes=bucket_bytes,
            capabilities=capabilities,
        )  # fmt: skip
    return found


def _sharded_sum(recipe: Recipe, *, on_gpu: bool) -> tuple[str, str]:
    """Returns the algorithm and wire format by which sharded gradients are summed."""
    asked = recipe.reduction.algorithm, recipe.reduction.wire
    known = asked[0] in SHARDED_ALGORITHMS and encodes_every_value(asked[1]) and not on_gpu
    return asked if known else (AUTO, "fp32")


def _way(plan: ParallelPlan, verdict: Verdict, own: ParallelPlan, sizes: ModelSizes, run: RunSizes) -> Way:
    is_current = is_same_way(plan, own)
    if verdict.refused:
        return Way(plan=plan, refused=verdict.refused, is_current=is_current)
    return Way(
        plan=plan,
        choices=verdict.choices,
        needs=partial(needs_of, plan, sizes, run),
        drops_reduction=verdict.drops_reduction,
        is_current=is_current,
    )
