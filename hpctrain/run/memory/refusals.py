"""Finds the ways to split a model that a run would refuse, and why. Does not communicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from hpctrain.distributed import ParallelPlan, TensorPlan, check_plan, divide_into_stages
from hpctrain.errors import HpctrainError
from hpctrain.run.memory.layouts import (
    KEYS,
    is_same_way,
    micro_batch_choices,
    pipeline_sizes,
    tensor_sizes,
)
from hpctrain.run.memory.sizes import RankGroups, StageSizes
from hpctrain.run.recipe.load import parse_recipe
from hpctrain.run.recipe.parallel_schema import check_enough_samples
from hpctrain.run.recipe.schema import Recipe, ReductionSection
from hpctrain.topology import ParallelMesh, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run would accept a plan.

    Attributes:
        refused: Why the run would refuse the plan; empty if it would accept the plan.
        drops_reduction: Whether the run would accept the plan only without the recipe's section [reduction].
        choices: The numbers of micro-batches to try.
    """

    refused: str = ""
    drops_reduction: bool = False
    choices: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Says whether a recipe's model can run with a plan (numbers of pipeline stages and tensor ranks, what is sharded).

    The model is on the meta device. A check that several plans share runs once.

    Attributes:
        own: The recipe's own plan.
        layers: A function that calls the task's `pipeline_layers`.
        stages: The divisions of the model into stages, by number of stages; filled by `judge`.
        reasons: For each check, the reason why the check refuses, empty if the check passes; filled by `judge`.
    """

    recipe: Recipe
    model: torch.nn.Module
    topology: Topology
    groups: RankGroups
    own: ParallelPlan
    on_gpu: bool = False
    layers: Callable[[], Sequence[torch.nn.Module]] = list
    stages: dict[int, StageSizes] = field(default_factory=dict)
    reasons: dict[tuple[object, ...], str] = field(default_factory=dict)

    def judge(self, plan: ParallelPlan) -> Verdict:
        """Returns whether a run of the recipe would start with `plan`."""
        refused = self._of_samples(plan) or self.of_model(plan) or self._of_ranks(plan)
        if refused:
            return Verdict(refused=refused)
        try:
            drops = self._check_recipe(plan)
        except HpctrainError as error:
            return Verdict(refused=_reason(error))
        choices = self._choices(plan)
        if not choices:
            return Verdict(refused=self._why_no_choices(plan))
        return Verdict(drops_reduction=drops, choices=choices)

    def of_model(self, plan: ParallelPlan) -> str:
        """Returns why `plan` cannot split the model, whatever the ranks; empty if it can."""
        sharded, stages = plan.shard == "parameters", plan.pipeline * plan.stages_per_rank
        key = ("model", plan.activation_checkpointing, plan.tensor, plan.sequence, sharded)
        found = self._once(key, lambda: check_plan(self.model, plan))
        if not found and plan.pipeline > 1:
            found = self._once(("stages", stages), lambda: self._find_stages(stages))
        return found

    def stages_of_parts(self, tensor_plan: TensorPlan) -> list[tuple[int, int]]:
        """Returns the pairs of pipeline size and tensor group size that the model and these ranks allow."""
        tensors = [
            size
            for size in tensor_sizes(self.topology)
            if tensor_plan and not self.of_model(ParallelPlan(tensor=size, tensor_plan=tensor_plan))
        ]
        return [
            (stages, size)
            for stages in (pipeline_sizes(self.topology) if tensors else ())
            if not self.of_model(ParallelPlan(pipeline=stages, micro_batches=stages))
            for size in tensors
            if self.topology.num_ranks % (stages * size) == 0
        ]

    def _of_samples(self, plan: ParallelPlan) -> str:
        try:
            check_enough_samples(
                global_batch=self.recipe.data.global_batch, ranks=self.topology.num_ranks,
                ranks_of_a_sample=plan.tensor * plan.pipeline,
            )  # fmt: skip
        except ValueError as error:
            return str(error)
        return ""

    def _of_ranks(self, plan: ParallelPlan) -> str:
        """Returns why `plan` does not match these ranks and their devices; empty if it does."""
        if plan.offload and not self.on_gpu:
            return "offload = true keeps what a GPU holds in host memory; these ranks compute on CPUs: leave it out"
        sizes = {"pipeline": plan.pipeline, "tensor": plan.tensor}
        found = self._once(("ranks", *sizes.values()), lambda: ParallelMesh.check(self.topology, **sizes))
        if not found and plan.shard_within == "node":
            key = ("nodes", *sizes.values())
            found = self._once(key, lambda: self.groups.mesh(plan).data_grid())
        return found

    def _once(self, key: tuple[object, ...], check: Callable[[], object]) -> str:
        """Returns the reason with which `check` refuses; empty if it does not. `check` runs once per key."""
        if key not in self.reasons:
            try:
                check()
                self.reasons[key] = ""
            except HpctrainError as error:
                self.reasons[key] = _reason(error)
        return self.reasons[key]

    def _check_recipe(self, plan: ParallelPlan) -> bool:
        """Returns True if the recipe's section [reduction] must be removed for `plan`.

        Raises RecipeError if the recipe is refused even without that section.
        """
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
            key: getattr(plan, key)
            for key in (*KEYS, "micro_batches")
            if getattr(plan, key) != getattr(usual, key)
        }
        document["run"] = {**document["run"], "ranks": self.topology.num_ranks}
        if not with_reduction:
            document.pop("reduction", None)
        if plan.pipeline > 1:
            document["data"] = {
                key: value for key, value in document["data"].items() if key != "micro_batches"
            }
        return document

    def _find_stages(self, number: int) -> None:
        found = divide_into_stages(self.model, self.layers(), num_stages=number)
        ends = accumulate(map(len, found.layers), initial=0)
        self.stages[number] = StageSizes(
            layers=tuple(range(begin, end) for begin, end in pairwise(ends)), stage_of=found.first_stage
        )

    def _choices(self, plan: ParallelPlan) -> Sequence[int]:
        recipe, data_ranks = self.recipe, self.groups.num_data_ranks(plan)
        batch = recipe.data.global_batch
        if plan.pipeline == 1:
            return micro_batch_choices(
                plan, samples=-(-batch // data_ranks), at_least=recipe.data.micro_batches
            )
        samples, rest = divmod(batch, data_ranks)
        asked = recipe.parallel.micro_batches if recipe.parallel.pipeline == plan.pipeline else 1
        if rest or (is_same_way(plan, self.own) and samples % asked):
            return ()
        return micro_batch_choices(plan, samples=samples, at_least=asked) or micro_batch_choices(
            plan, samples=samples, at_least=1
        )

    def _why_no_choices(self, plan: ParallelPlan) -> str:
        replicas, batch = self.groups.num_data_ranks(plan), self.recipe.data.global_batch
        if is_same_way(plan, self.own):
            parts = self.own.micro_batches
            return (
                f"data.global_batch = {batch} cannot be split into parallel.micro_batches = {parts} equal parts on "
                f"each of {replicas} data-parallel ranks: use a multiple of {replicas * parts}"
            )
        return (
            f"data.global_batch = {batch} cannot be split into equal micro-batches for {replicas} data-parallel ranks "
            f"and pipeline = {plan.pipeline}: use a multiple of {replicas * plan.pipeline}"
        )


def _reason(error: HpctrainError) -> str:
    """Returns the last line of an error, without the name of the section."""
    last = str(error).rpartition("\n")[2].strip()
    return last.removeprefix("recipe: ").removeprefix("parallel: ")
