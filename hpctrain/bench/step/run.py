"""Starts one training run of a step measurement, waits for it, and reads its records."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.bench.step.plan import StepCell, recipe_of
from hpctrain.errors import HpctrainError, LaunchError, StoppedEarly, from_exit_code
from hpctrain.launch import ForkServer, Launcher, LocalMachine, plan_launch, resolve_command, run_launch
from hpctrain.run import Recipe, to_toml
from hpctrain.telemetry import RunDirectory

LAST_LINES = 20
# All runs of a measurement are forked from the same servers, which wait so long for the next run.
_SERVERS, _SERVERS_WAIT_S = f"bench-{os.getpid()}", 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRun:
    """The records of a run's measured steps. Each tuple has one entry per step.

    Attributes:
        step_s: The seconds of the step on its slowest rank.
        exposed_s: The seconds for which a rank was blocked by communication, as the mean over the ranks.
        samples: The number of samples of all ranks.
    """

    cell: StepCell
    step_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    samples: tuple[int, ...]
    environment: dict[str, Any]

    @property
    def samples_per_s(self) -> float:
        return sum(self.samples) / sum(self.step_s)

    @property
    def exposed_share(self) -> float:
        return sum(self.exposed_s) / sum(self.step_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "samples_per_s": self.samples_per_s,
            "step_s": list(self.step_s),
            "exposed_s": list(self.exposed_s),
            "samples": list(self.samples),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class HowToRun:
    """The settings common to all runs of a measurement.

    threads: the number of threads per rank.
    module_folder: a folder that is searched for the task's module.
    """

    machine: LocalMachine
    launcher: Launcher
    ranks_per_node: int | None
    threads: int
    module_folder: Path
    environ: Mapping[str, str]


def run_once(
    recipe: Recipe, cell: StepCell, *, how: HowToRun, directory: Path, steps: int, warmup_steps: int
) -> StepRun:
    """Trains `warmup_steps + steps` steps in `directory`, which is always removed at the end.

    While the ranks run, signals are handled as in `run_launch`: the first Ctrl-C lets the ranks end after their current
    step, and a second one ends them at once. Then StoppedEarly is raised. If the run fails, the error class of its exit
    code is raised; the message has the run's last lines of output.
    """
    directory.mkdir(parents=True)
    try:
        asked = recipe_of(
            recipe, cell, directory=directory / "run", steps=warmup_steps + steps, threads=how.threads
        )
        recipe_path = directory / "recipe.toml"
        recipe_path.write_text(to_toml(asked), encoding="utf-8")
        launch_run(recipe_path, cell, how=how, output=directory / "output.txt")
        return read_step_records(
            directory / "run", cell, first_step=warmup_steps + 1, last_step=warmup_steps + steps
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def launch_run(recipe_path: Path, cell: StepCell, *, how: HowToRun, output: Path) -> None:
    """Starts the ranks of a recipe that was changed for measuring, and waits for their end.

    output: file for the ranks' output.

    See `run_once` for signals and errors.
    """
    environ = _environment(how)
    ranks_per_node = how.ranks_per_node
    plan = plan_launch(
        [resolve_command("hpctrain"), "train", str(recipe_path), "--resume", "never"],
        num_ranks=cell.num_ranks,
        ranks_per_node=None if ranks_per_node is None else min(ranks_per_node, cell.num_ranks),
        environ=environ,
        machine=how.machine,
        launcher=how.launcher,
        fork_server=ForkServer(key=_SERVERS, lingers_s=_SERVERS_WAIT_S, by_default=True),
    )
    with output.open("wb") as file:
        outcome = run_launch(plan, environ=environ, messages=io.StringIO(), output=file)
    if outcome.stop_asked:
        raise StoppedEarly("stopped during a run; its files were removed")
    if outcome.exit_code != 0:
        raise _failure(outcome.exit_code, cell=cell, plan_line=plan.shell_line(), output=output)


def _environment(how: HowToRun) -> dict[str, str]:
    # The changed recipe is in another folder, so the folder of the user's recipe, which may hold the task, is added.
    path = [how.environ.get("PYTHONPATH", ""), str(how.module_folder)]
    return {
        **how.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": how.environ.get("OMP_NUM_THREADS") or str(how.threads),
    }


def _failure(exit_code: int, *, cell: StepCell, plan_line: str, output: Path) -> HpctrainError:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = "\n".join(f"  {line}" for line in lines[-LAST_LINES:]) or "  (it printed nothing)"
    ranks = f"{cell.num_ranks} rank{'s' if cell.num_ranks > 1 else ''}"
    kind = from_exit_code(exit_code)
    return (LaunchError if kind is HpctrainError else kind)(
        f"the run on {ranks} with a global batch of {cell.global_batch} ended with exit code {exit_code}. "
        f"Its last lines:\n{shown}\nIt was started with: {plan_line}"
    )


def read_step_records(directory: Path, cell: StepCell, *, first_step: int, last_step: int) -> StepRun:
    """Reads the records of the steps `first_step` to `last_step` of all ranks. Raises LaunchError if any is missing."""
    by_rank = read_steps(directory, num_ranks=cell.num_ranks, first_step=first_step, last_step=last_step)
    at_once = list(zip(*by_rank, strict=True))
    return StepRun(
        cell=cell,
        step_s=tuple(max(record["seconds"]["step"] for record in step) for step in at_once),
        exposed_s=tuple(
            sum(record["seconds"]["exposed_sync"] for record in step) / len(step) for step in at_once
        ),
        samples=tuple(sum(record["samples"] for record in step) for step in at_once),
        environment=RunDirectory(directory, error=LaunchError).environment(),
    )


def read_steps(
    directory: Path, *, num_ranks: int, first_step: int, last_step: int
) -> list[list[dict[str, Any]]]:
    """Returns each rank's records of the steps `first_step` to `last_step`. Raises LaunchError if any is missing."""
    run = RunDirectory(directory, error=LaunchError)
    by_rank = []
    for rank in range(num_ranks):
        records = run.steps(rank, num_ranks=num_ranks, advice="give --scratch a folder that all nodes share")
        missing = [step for step in range(first_step, last_step + 1) if step not in records]
        if missing:
            raise LaunchError(
                f"rank {rank} did not record step {missing[0]} of {last_step} in {run.records_path(rank)}"
            )
        by_rank.append([records[step] for step in range(first_step, last_step + 1)])
    return by_rank
