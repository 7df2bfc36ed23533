"""Makes one run of a sweep: starts its ranks as a user does, waits, and reads their records."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpctrain.bench.scaling.document import RankSums, ScalingRun, SweepSettings
from hpctrain.bench.scaling.plan import PlannedRun
from hpctrain.bench.step.plan import StepCell, recipe_of
from hpctrain.bench.step.run import HowToRun, launch_run, read_steps
from hpctrain.data import add_sample_sums
from hpctrain.errors import LaunchError
from hpctrain.run import Recipe, to_toml


class Starter(Protocol):
    """Starts the ranks of a run."""

    def start(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> str | None:
        """Trains `recipe` to its end on `cell.num_ranks` ranks; its run directory is `directory`/run.

        Returns the number of the run's own Slurm job, None if it had none. Raises StoppedEarly if this process was
        asked to stop, else the error class of the run's exit code, with its last lines of output.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """Starts ranks here: by mpirun, or by srun in this allocation, as `hpctrain launch` does."""

    how: HowToRun

    def start(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> None:
        path = directory / "recipe.toml"
        path.write_text(to_toml(recipe), encoding="utf-8")
        launch_run(path, cell, how=self.how, output=directory / "output.txt")


def run_size(
    recipe: Recipe,
    planned: PlannedRun,
    *,
    settings: SweepSettings,
    starter: Starter,
    threads: int,
    directory: Path,
    with_environment: bool,
    keep: Path | None = None,
) -> ScalingRun:
    """Makes one run in `directory`, which is removed at the end. threads: of each rank, unless the recipe says.

    with_environment: whether the result has the run's environment.json. keep: folder to which the run directory is
    moved as `ranks-N` if all went well, instead of the one that is there. Raises the errors of `Starter.start`, and
    LaunchError if records are missing.
    """
    directory.mkdir(parents=True)
    try:
        changed = recipe_of(
            recipe, planned.cell, directory=directory / "run", steps=settings.warmup_steps + settings.steps,
            threads=threads,
        )  # fmt: skip
        telemetry = changed.telemetry.model_copy(update={"sample_sums": True})
        started = time.time()
        job = starter.start(
            changed.model_copy(update={"telemetry": telemetry}), planned.cell, directory=directory
        )
        ended = time.time()
        first = settings.warmup_steps + 1
        steps = read_steps(
            directory / "run", num_ranks=planned.cell.num_ranks, first_step=first, last_step=first + settings.steps - 1
        )  # fmt: skip
        environment = json.loads((directory / "run" / "environment.json").read_text(encoding="utf-8"))
        if keep is not None:
            _keep(directory / "run", keep / f"ranks-{planned.cell.num_ranks}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return summarize_run(
        planned, steps, environment=environment, started=started, ended=ended, job=job,
        with_environment=with_environment,
    )  # fmt: skip


def summarize_run(
    planned: PlannedRun,
    steps: Sequence[Sequence[dict[str, Any]]],
    *,
    environment: dict[str, Any],
    started: float,
    ended: float,
    job: str | None,
    with_environment: bool,
) -> ScalingRun:
    """Returns the run's entry of the document. steps: of each rank its records of the measured steps. Pure.

    Raises LaunchError if the records have no hash of their samples.
    """
    at_once = list(zip(*steps, strict=True))
    if not all("sample_sum" in record for step in at_once for record in step):
        raise LaunchError(
            "the run's records have no `sample_sum`: were its ranks started with another version of hpctrain?"
        )
    step_s = [max(record["seconds"]["step"] for record in step) for step in at_once]
    samples = sum(record["samples"] for step in at_once for record in step)
    by_rank = [
        RankSums(
            rank=rank, host=about["host"], node=about["node"], samples=sum(record["samples"] for record in records),
            seconds=_sums(records),
        )
        for rank, (about, records) in enumerate(zip(environment["ranks"], steps, strict=True))
    ]  # fmt: skip
    return ScalingRun(
        round=planned.round,
        place=planned.place,
        ranks=planned.cell.num_ranks,
        nodes=len(environment["node_names"]),
        global_batch=planned.cell.global_batch,
        started=started,
        ended=ended,
        samples_per_s=samples / sum(step_s),
        step_s=step_s,
        samples=samples,
        sample_sums=[add_sample_sums(record["sample_sum"] for record in step) for step in at_once],
        by_rank=by_rank,
        job=job,
        environment=environment if with_environment else None,
    )


def _keep(directory: Path, target: Path) -> None:
    """Moves a run directory, without its checkpoints. Raises LaunchError if it cannot."""
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(directory, target)
    except OSError as error:
        raise LaunchError(f"the run cannot be kept in {target}: {error.strerror}") from error


def _sums(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record["seconds"])
    return {name: sum(record["seconds"].get(name, 0.0) for record in records) for name in names}
