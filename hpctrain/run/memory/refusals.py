"""Which ways to split a model a run would refuse, and why. Does not communicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from hpctrain.distributed import ParallelPlan, check_plan, divide
from hpctrain.errors import HpctrainError
from hpctrain.run.memory.layouts import micro_batch_choices
from hpctrain.run.memory.sizes import StageSizes
from hpctrain.run.recipe.load import parse_recipe
from hpctrain.run.recipe.schema import Recipe, ReductionSection
from hpctrain.topology import ParallelMesh, Topology

_KEYS = (
    "shard", "shard_within", "activation_checkpointing", "tensor", "pipeline", "schedule", "micro_batches",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """refused: why a run would refuse the plan; empty if it would not. drops_reduction: whether it would only without
    the recipe's section [reduction]. choices: numbers of micro-batches to try."""

    refused: str = ""
    drops_reduction: bool = False
    choices: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judges plans for one recipe and its model, on the meta device. layers: calls the task's `pipeline_layers`.

    stages: those that plans were found to have, by their number; filled by `judge`.
    """

    recipe: Recipe
    model: torch.nn.Module
    topology: Topology
    on_gpu: bool = False
    layers: Callable[[], Sequence[torch.nn.Module]] = list
    stages: dict[int, StageSizes] = field(default_factory=dict)

    def judge(self, plan: ParallelPlan) -> Verdict:
        """Returns whether a run of the recipe with `plan` would start."""
        drops = False
        try:
            check_plan(self.model, plan)
            mesh = ParallelMesh.plan(self.topology, pipeline=plan.pipeline, tensor=plan.tensor)
            if plan.shard_within == "node":
                mesh.data_grid()
            if plan.pipeline > 1:
                self._check_stages(plan)
            drops = self._check_recipe(plan)
        except HpctrainError as error:
            return Verdict(refused=_reason(error))
        choices = self._choices(plan)
        if not choices:
            replicas = self.topology.num_ranks // plan.pipeline
            return Verdict(
                refused=f"data.global_batch = {self.recipe.data.global_batch} cannot be split into equal micro-batches "
                f"for {replicas} data-parallel ranks and pipeline = {plan.pipeline}: use a multiple of "
                f"{replicas * plan.pipeline}"
            )
        return Verdict(drops_reduction=drops, choices=choices)

    def _check_recipe(self, plan: ParallelPlan) -> bool:
        """Returns True if the section [reduction] has to go. Raises RecipeError if the plan is refused even then."""
        changed = self.recipe.reduction != ReductionSection()
        if plan.shard == "none" and plan.tensor == plan.pipeline == 1:
            changed = False  # it stays in any case
        elif changed and plan.shard == "parameters" and self.on_gpu:  # NCCL sums
            parse_recipe(self._document(plan, with_reduction=False))
            return True
        try:
            parse_recipe(self._document(plan, with_reduction=True))
        except HpctrainError:
            if not changed:
                raise
            parse_recipe(self._document(plan, with_reduction=False))
            return True
        return False

    def _document(self, plan: ParallelPlan, *, with_reduction: bool) -> dict[str, Any]:
        document = self.recipe.model_dump(exclude_unset=True)
        usual = ParallelPlan()
        document["parallel"] = {
            key: getattr(plan, key) for key in _KEYS if getattr(plan, key) != getattr(usual, key)
        }
        document["run"] = {**document["run"], "ranks": self.topology.num_ranks}
        if not with_reduction:
            document.pop("reduction", None)
        if plan.pipeline > 1:
            document["data"] = {
                key: value for key, value in document["data"].items() if key != "micro_batches"
            }
        return document

    def _check_stages(self, plan: ParallelPlan) -> None:
        number = plan.pipeline * plan.stages_per_rank
        if number in self.stages:
            return
        found = divide(self.model, self.layers(), num_stages=number)
        ends = accumulate(map(len, found.layers), initial=0)
        self.stages[number] = StageSizes(
            layers=tuple(range(begin, end) for begin, end in pairwise(ends)), stage_of=found.first_stage
        )

    def _choices(self, plan: ParallelPlan) -> Sequence[int]:
        recipe, together = self.recipe, plan.tensor * plan.pipeline
        data_ranks = self.topology.num_ranks // together
        if plan.pipeline == 1:
            samples = -(-recipe.data.global_batch // data_ranks)
            return micro_batch_choices(plan, samples=samples, at_least=recipe.data.micro_batches)
        if recipe.data.global_batch % data_ranks:
            return ()
        same = recipe.parallel.pipeline == plan.pipeline
        return micro_batch_choices(
            plan, samples=recipe.data.global_batch // data_ranks,
            at_least=recipe.parallel.micro_batches if same else 1,
        )  # fmt: skip


def _reason(error: HpctrainError) -> str:
    """Returns the last line of an error, without the name of the section."""
    last = str(error).rpartition("\n")[2].strip()
    return last.removeprefix("recipe: ").removeprefix("parallel: ")
