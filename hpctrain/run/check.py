"""`hpctrain check`: runs the experiments on a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import broadcast_tensors
from hpctrain.data import Batch, Loader
from hpctrain.distributed import is_sharded, pipeline_of, split_of
from hpctrain.errors import HpctrainError, RecipeError
from hpctrain.reduce import DistributedOptimizer, gradient_bytes
from hpctrain.run.build import (
    build_parts,
    build_runner,
    build_schedule,
    parallelized,
    reduction_plan,
    total_steps,
)
from hpctrain.run.compute.device import loss_scale_for
from hpctrain.run.compute.postponed_dynamo import set_deterministic
from hpctrain.run.data import open_data
from hpctrain.run.experiments.causes.decide import find_causes
from hpctrain.run.experiments.causes.findings import CheckReport
from hpctrain.run.experiments.measuring.own_state import variables_of_module
from hpctrain.run.experiments.measuring.samples import row_hashes, rows_not_finite
from hpctrain.run.experiments.observe import Experiments
from hpctrain.run.experiments.subject import BatchRows, Setting, scratch_folder
from hpctrain.run.initial_state import start_from_weights
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session, init
from hpctrain.topology import Axis
from hpctrain.train import (
    LOSS_WEIGHT,
    LR_SCALE,
    Position,
    Stateful,
    Task,
    TaskRunner,
    derive_seed,
    evaluate,
    import_named,
    import_task,
    seed_generators,
)

# A recipe as the subject of experiments: its own parts, without the run directory, records and guards.


_EVALUATED = 2  # batches


@final
class RecipeSubject:
    """A recipe as the `Subject` of experiments.

    search: the folders, besides Python's own path, that are searched for the modules named in the recipe.
    """

    loss_is_share = True

    def __init__(self, recipe: Recipe, *, search: Sequence[Path], scratch: Path) -> None:
        self.recipe = recipe
        self.search = search
        self.scratch = scratch
        self.name = recipe.run.name
        self.asks_double = recipe.run.precision == "fp64"
        self.can_split = recipe.parallel.pipeline == 1
        self.splits = recipe.data.micro_batches > 1
        self.repeats_samples = recipe.data.chosen_order == "weighted"
        self.is_shuffled: bool | None = recipe.data.chosen_order in ("shuffle", "blocks", "stratified")

    def make_task(self) -> Task:
        section = self.recipe.task
        return import_task(section.target, options=section.options, search=self.search)

    def variables(self) -> dict[str, Any]:
        data, optimizer = self.recipe.data, self.recipe.optimizer
        targets = {
            "task.target": self.recipe.task.target,
            "data.transform": data.transform,
            "optimizer.target": optimizer.target,
        }
        return {
            f"the module of {key}": variables_of_module(import_named(target, key=key, search=self.search))
            for key, target in targets.items()
            if target is not None
        }

    def open(self, session: Session, setting: Setting) -> RecipeTrial:
        changed = self._changed(setting, one_rank=session.world_size == 1)
        return RecipeTrial(self, changed, session, setting)

    def _changed(self, setting: Setting, *, one_rank: bool) -> Recipe:
        """Returns the recipe as a trial uses it.

        The trial computes in float64 if `setting.double`. Gradients are sent in each step, with the wire format
        `fp32`. They are summed by a fixed algorithm, unless the recipe names one and there are several ranks. On one
        rank the model is not split.
        """
        recipe = self.recipe
        run = recipe.run.model_copy(update={"precision": "fp64"} if setting.double else {})
        is_free = one_rank or recipe.reduction.algorithm == "auto"
        parallel = type(recipe.parallel)() if one_rank else recipe.parallel
        exact = (
            "auto" if parallel.shard == "parameters" else "flat"
        )  # of a sharded model: FSDP2's own operation
        algorithm = exact if is_free else recipe.reduction.algorithm
        exact_sums = {"wire": "fp32", "algorithm": algorithm, "schedule": None}
        reduction = recipe.reduction.model_copy(update=exact_sums)
        return recipe.model_copy(update={"run": run, "reduction": reduction, "parallel": parallel})


@final
class RecipeTrial:
    """A `Trial` of a recipe, created as `hpctrain.run.training.carry_out` creates a run."""

    def __init__(self, subject: RecipeSubject, recipe: Recipe, session: Session, setting: Setting) -> None:
        self.session = session
        self._subject = subject
        self._recipe = recipe
        self._task = subject.make_task()
        self._data = open_data(recipe.data, session=session)
        parts = session.agreed(
            lambda: build_parts(recipe, self._task, session=session, data=self._data), os_error=RecipeError
        )
        parts = parallelized(parts, recipe, task=self._task, session=session)
        whole = (
            recipe.parallel.shard != "parameters" and recipe.parallel.tensor == recipe.parallel.pipeline == 1
        )
        reduction = None
        if whole:
            reduction = session.reductions.make(
                reduction_plan(recipe),
                gradient_bytes=gradient_bytes(parts.model),
                shard=recipe.parallel.shard,
            )
        if recipe.reduction.sync_batch_norm:
            parts = replace(parts, model=session.sync_batch_norm(parts.model))
        self.model = parts.model
        self.optimizer = parts.optimizer
        updater = session.distributed_optimizer(
            parts.model, parts.optimizer, algorithm=recipe.reduction.algorithm, wire="fp32", reduction=reduction,
            loss_scale=loss_scale_for(
                recipe.run.precision, wire="fp32", max_skipped_in_row=recipe.optimizer.max_skipped_in_row
            ),
            clip_norm=recipe.optimizer.clip_norm, compare_ranks="off",  # as in `sum_exactly`
            fused=recipe.optimizer.fused,
        )  # fmt: skip
        self.updater: DistributedOptimizer = updater
        self.drawing: Axis | None = session.axes.drawing
        self.also: Mapping[str, Stateful | None] = {}
        self.is_split = (
            pipeline_of(parts.model) is not None
            or split_of(parts.model) is not None
            or is_sharded(parts.model)
        )
        self._parts = parts
        seed_generators(
            derive_seed(recipe.run.seed + setting.seed_change, "rank", session.axes.drawing.index)
        )
        start_from_weights(recipe, parts.model, session=session)
        steps = total_steps(recipe, parts.loader, position=Position())
        self._schedule = build_schedule(recipe, steps=steps, decay=parts.decay)
        self._runner = build_runner(
            recipe, self._task, parts, session=session, updater=updater, loss_unit=None
        )
        self._held_out: Loader = parts.held_out or session.loader(
            self._data.dataset,
            global_batch=max(recipe.data.global_batch, session.axes.data.size),
            shuffle=False,
        )
        self._step = 0

    @property
    def batches_per_epoch(self) -> int:
        return self._parts.loader.batches_per_epoch

    @property
    def has_epochs(self) -> bool:
        return True

    def batches(self, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        self._step = epoch * self.batches_per_epoch + skip
        with self._parts.loader.epoch(epoch, start=skip * self._recipe.data.global_batch) as batches:
            yield from batches

    def step(self, batch: Batch, *, micro_batches: int = 1) -> float:
        lr = self._schedule.lr(self._step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        parts = micro_batches if self._subject.can_split else self._recipe.micro_batches
        loss = self._runner.forward_backward(batch, self.updater, micro_batches=parts)
        weight = self._runner.weights.total
        sums = {"loss": loss} if weight is None else {"loss": loss, LOSS_WEIGHT: weight}
        outcome = self.updater.step(sums=sums, divide_by=None if weight is None else LOSS_WEIGHT)
        self._step += 1
        # The ranks' contributions to the mean loss of the batch.
        return loss if weight is None else loss / (outcome.sums[LOSS_WEIGHT] or 1.0)

    def rows(self, batch: Batch) -> BatchRows:
        real = batch.real()
        if not self.session.axes.counts_samples:
            return BatchRows(indices=[], hashes=[])
        indices = real.indices if real.indices is not None else np.arange(0)
        return BatchRows(
            indices=[int(i) for i in indices],
            hashes=row_hashes(real.fields, real.num_samples),
            not_finite=[
                (int(indices[row]), name) for row, name in rows_not_finite(real.fields, real.num_samples)
            ],
        )

    def part(self, batch: Batch, rows: Sequence[int]) -> Batch:
        fields = {name: tensor[list(rows)] for name, tensor in batch.real().fields.items()}
        return replace(batch, fields=fields, num_samples=len(rows), num_padded=0, indices=None)

    def repeated(self, batch: Batch, copies: int) -> Batch:
        return replace(batch, global_samples=batch.global_samples * copies)

    def poisoned(self, batch: Batch) -> Batch | None:
        fields, found = dict(batch.fields), False
        for name, tensor in fields.items():
            if tensor.is_floating_point() and tensor.numel():
                fields[name] = tensor.clone()
                fields[name].reshape(-1)[0] = float("nan")
                found = True
        return replace(batch, fields=fields) if found else None

    def cleaned(self, batch: Batch) -> Batch:
        floating = {name: torch.nan_to_num(t) for name, t in batch.fields.items() if t.is_floating_point()}
        return replace(batch, fields={**batch.fields, **floating})

    def loss(self, batch: Batch) -> tuple[float, float | None]:
        assert isinstance(self._runner, TaskRunner)
        with torch.enable_grad():  # as in training, which tasks may ask for
            loss, weight = self._runner.weighed_loss(batch)
        return float(loss.detach()), weight

    def evaluate(self) -> Mapping[str, float]:
        # As `Training` does: what is evaluated is what is saved.
        self.updater.wait_for_parameters()
        pipeline = pipeline_of(self.model)
        comm = self.session.world if pipeline is None else pipeline.replicas
        broadcast_tensors(comm, list(self.model.buffers()), root=0, name="the model's buffers")
        return evaluate(
            self._runner,
            self._held_out,
            comm=self.session.world,
            max_samples=_EVALUATED * self._held_out.global_batch,
        )

    def roots(self) -> dict[str, Any]:
        return {
            "task": self._task, "model": self.model, "optimizer": self.optimizer, **self._subject.variables(),
        }  # fmt: skip

    def close(self) -> None:
        """Does nothing, since the session ends the updater and the groups."""


# The check of a recipe, on the ranks that were started.


# A rank that fails alone leaves the others waiting; a check's operations are short.
_TIMEOUT_S = 120.0


def check_recipe(recipe: Recipe, *, recipe_path: Path, steps: int, scratch: Path) -> CheckReport:
    """Checks a recipe on the ranks that the launcher started. Writes nothing into the run directory. Collective.

    scratch: a folder that all nodes share, for a few checkpoints, which are removed. Raises RecipeError on fewer than
    two ranks; LaunchError if no folder can be created in `scratch`; CheckpointError if checkpoints cannot be written
    there; and the errors of a run that cannot start.
    """
    with init(
        backend=recipe.run.backend, device=recipe.run.device, threads_per_rank=recipe.run.threads_per_rank,
        timeout_s=min(recipe.run.timeout_s, _TIMEOUT_S),
    ) as session:  # fmt: skip
        try:
            return check_with(session, recipe, recipe_path=recipe_path, steps=steps, scratch=scratch)
        except HpctrainError as error:
            if not error.agreed:
                raise
            failed = error  # all ranks raise it: the session ends normally
    raise failed


def check_with(
    session: Session, recipe: Recipe, *, recipe_path: Path, steps: int, scratch: Path, quiet: bool = False
) -> CheckReport:
    """Checks a recipe on the ranks of an open session; see `check_recipe`. Collective.

    quiet: True to print no progress.
    """
    search = [Path.cwd(), recipe_path.absolute().parent]
    if session.world_size < 2:
        raise RecipeError("a check compares ranks: start it with -n 2 or more", agreed=True)
    if recipe.run.deterministic:
        set_deterministic()
    say = progress_printer(1 if quiet else session.rank)
    with scratch_folder(scratch, comm=session.world) as folder:
        subject = session.agreed(
            lambda: RecipeSubject(recipe, search=search, scratch=folder), os_error=RecipeError
        )
        session.agreed(subject.variables, os_error=RecipeError)  # imports the user's modules
        observations = Experiments(subject, session, steps=steps, say=say).observe()
    return CheckReport(name=subject.name, observations=observations, findings=find_causes(observations))


def progress_printer(rank: int) -> Callable[[str], None]:
    """Returns a function that prints a line of progress to stderr on rank 0, and does nothing on other ranks."""

    def say(text: str) -> None:
        if rank == 0:
            print(f"checking: {text}", file=sys.stderr, flush=True)

    return say
