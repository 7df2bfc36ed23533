"""Plans the training runs of a step measurement: their configurations, order and recipes."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.launch import LocalMachine, place_ranks
from hpctrain.run import Recipe


class ScalingKind(str, Enum):
    """The kinds of scaling.

    STRONG: the ranks share the recipe's global batch. WEAK: each rank has that global batch.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StepCell:
    """A configuration to measure. With one rank, strong and weak scaling are the same configuration, measured once."""

    num_ranks: int
    global_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAsked:
    """The settings of the measurement. Raises UsageError for values out of range.

    steps: the number of measured steps per run.
    warmup_steps: the number of steps before them, which are not counted.
    """

    ranks: tuple[int, ...]
    modes: tuple[ScalingKind, ...]
    steps: int
    warmup_steps: int
    repeats: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ranks or not self.modes:
            raise UsageError("nothing to measure: give at least one number of --ranks and one of --modes")
        if any(n < 1 for n in self.ranks):
            raise UsageError(f"--ranks {','.join(map(str, self.ranks))}: a run has at least 1 rank")
        if self.steps < 1 or self.warmup_steps < 0 or self.repeats < 1:
            raise UsageError(
                f"--steps {self.steps} --warmup-steps {self.warmup_steps} --repeats {self.repeats}: give at "
                "least 1 step, 0 warm-up steps and 1 repeat"
            )

    def cell(self, mode: ScalingKind, num_ranks: int, *, batch: int) -> StepCell:
        """Returns the configuration for a mode and a number of ranks. `batch` is the recipe's global batch."""
        factor = num_ranks if mode is ScalingKind.WEAK else 1
        return StepCell(num_ranks=num_ranks, global_batch=batch * factor)


def parse_ranks(text: str, *, option: str = "--ranks") -> tuple[int, ...]:
    """Parses `1,2,4`. Returns the numbers ascending, without duplicates. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{option} {text!r}: write numbers separated by commas, as 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def parse_modes(text: str) -> tuple[ScalingKind, ...]:
    """Parses `strong`, `weak`, or both separated by a comma. Raises UsageError."""
    modes = {mode.value: mode for mode in ScalingKind}
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [word for word in words if word not in modes]
    if unknown:
        raise UsageError(
            f"--modes: there is no {unknown[0]!r}; choose {', '.join(modes)}, or both separated by a comma"
        )
    return tuple(modes[word] for word in words)


def cells_of(asked: StepAsked, *, batch: int) -> list[StepCell]:
    """Returns every configuration once, sorted. Raises UsageError if a rank would have no sample."""
    too_many = [n for n in asked.ranks if ScalingKind.STRONG in asked.modes and n > batch]
    if too_many:
        raise UsageError(
            f"{too_many[0]} ranks cannot share the recipe's global batch of {batch} (strong scaling): use fewer "
            "ranks, --modes weak, or a larger batch with --set data.global_batch=N"
        )
    return sorted({asked.cell(mode, n, batch=batch) for mode in asked.modes for n in asked.ranks})


def order_of_runs(cells: Sequence[StepCell], *, repeats: int, seed: int) -> list[StepCell]:
    """Returns every configuration once per round, shuffled in each round, so that drift affects all configurations."""
    generator = random.Random(seed)
    order: list[StepCell] = []
    for _ in range(repeats):
        round_ = list(cells)
        generator.shuffle(round_)
        order += round_
    return order


def recipe_of(recipe: Recipe, cell: StepCell, *, directory: Path, steps: int, threads: int) -> Recipe:
    """Returns the user's recipe changed for measuring: `steps` steps, no evaluation, a checkpoint only at the end.

    directory: the run directory of the measured run. Its checkpoint is written there, never into the user's directory.
    threads: the CPU threads per rank, unless the recipe sets them.
    """
    run = recipe.run.model_copy(
        update={
            "directory": str(directory),
            "epochs": None,
            "steps": steps,
            "ranks": None,
            "threads_per_rank": recipe.run.threads_per_rank or threads,
        }
    )
    data = recipe.data.model_copy(update={"global_batch": cell.global_batch, "held_out": None})
    checkpoint = recipe.checkpoint.model_copy(
        update={"every_steps": None, "every_minutes": None, "every": None, "directory": None, "local": None}
    )
    telemetry = recipe.telemetry.model_copy(
        update={"metrics_every_steps": 1, "evaluate_every_steps": None, "ranks": "all"}
    )
    return recipe.model_copy(
        update={"run": run, "data": data, "checkpoint": checkpoint, "telemetry": telemetry}
    )


# Settings that the runs of a measurement share: threads per rank, a folder for their files, cores for
# every rank.


def threads_of_a_rank(most_ranks: int, *, machine: LocalMachine, ranks_per_node: int | None) -> int:
    """Returns the number of threads per rank, the same for every number of ranks.

    This is OMP_NUM_THREADS or SLURM_CPUS_PER_TASK; if neither is set, the number of cores per rank when `most_ranks`
    ranks run, since one rank with threads on all cores would not be a fair baseline.
    """
    given = os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK") or ""
    if given.isdigit() and int(given) > 0:
        return int(given)
    most = place_ranks(most_ranks, ranks_per_node, environ=os.environ, hosts=(), notes=[])
    return max(1, machine.num_cores // most.ranks_on_a_node)


def runs_folder(recipe: Recipe, *, shared: bool) -> Path:
    """Returns a folder for the runs' files.

    This is the system's temporary folder. If all nodes must see the files (`shared`), it is the nearest existing
    directory above the recipe's run directory, or that directory itself.
    """
    if not shared:
        return Path(tempfile.gettempdir())
    place = Path(recipe.run.directory).absolute()
    while not place.is_dir():
        place = place.parent
    return place


def shares_cores(num_ranks: int, *, machine: LocalMachine, ranks_per_node: int | None) -> bool:
    """Returns True if there are more ranks than cores on this machine.

    In a Slurm job it returns False, since Slurm has given each rank its cores.
    """
    if os.environ.get("SLURM_JOB_ID"):
        return False
    placed = place_ranks(num_ranks, ranks_per_node, environ=os.environ, hosts=(), notes=[])
    return placed.ranks_on_a_node > machine.num_cores
