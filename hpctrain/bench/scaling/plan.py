"""Plans a scaling sweep: its sizes, the order of its runs, and what of it is left to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.bench.scaling.document import ScalingDocument, ScalingRun, SweepSettings
from hpctrain.bench.step.plan import StepCell, order_of_runs
from hpctrain.errors import UsageError

LEAST_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One start of the ranks. round, place: from 0."""

    round: int
    place: int
    cell: StepCell


def ranks_of_nodes(nodes: Sequence[int], *, ranks_per_node: int | None) -> list[int]:
    """Returns the numbers of ranks on these numbers of nodes. Raises UsageError without `ranks_per_node`."""
    if ranks_per_node is None:
        raise UsageError(
            "--nodes needs to know how many ranks a node has: give --ranks-per-node, or slurm.tasks_per_node in "
            "the recipe"
        )
    return [count * ranks_per_node for count in nodes]


def check_settings(settings: SweepSettings, *, batch: int) -> None:
    """Raises UsageError if the sweep cannot be measured. batch: the recipe's global batch."""
    if settings.repeats < LEAST_REPEATS:
        raise UsageError(
            f"--repeats {settings.repeats}: intervals and comparisons need at least {LEAST_REPEATS} rounds (three "
            "against three cannot even reach p = 0.05); `hpctrain bench step` measures with fewer"
        )
    if settings.mode == "strong" and max(settings.ranks) > batch:
        raise UsageError(
            f"{max(settings.ranks)} ranks cannot share the recipe's global batch of {batch} (strong scaling): use "
            "fewer ranks, --weak, or a larger batch with --set data.global_batch=N"
        )
    per_node = settings.ranks_per_node
    if settings.start == "jobs" and per_node is not None:
        uneven = [n for n in settings.ranks if n > per_node and n % per_node]
        if uneven:
            raise UsageError(
                f"--jobs: {uneven[0]} ranks do not fill nodes of {per_node}: choose multiples of {per_node}, or "
                "another --ranks-per-node"
            )


def cells_of(settings: SweepSettings, *, batch: int) -> list[StepCell]:
    """Returns the sizes of the sweep: each number of ranks with its global batch.

    Strong scaling: the recipe's batch, shared. Weak scaling: that batch for each rank.
    """
    return [
        StepCell(num_ranks=n, global_batch=batch * (n if settings.mode == "weak" else 1))
        for n in settings.ranks
    ]


def plan_runs(settings: SweepSettings, *, batch: int) -> list[PlannedRun]:
    """Returns all runs in their order: in each round every size once, shuffled by the seed.

    More repeats only add rounds: the order of those before stays.
    """
    cells = cells_of(settings, batch=batch)
    order = order_of_runs(cells, repeats=settings.repeats, seed=settings.seed)
    return [
        PlannedRun(round=number // len(cells), place=number % len(cells), cell=cell)
        for number, cell in enumerate(order)
    ]


def remaining_runs(planned: Iterable[PlannedRun], done: Iterable[ScalingRun]) -> list[PlannedRun]:
    """Returns what has not been measured yet, in order."""
    measured = {(run.round, run.ranks) for run in done}
    return [run for run in planned if (run.round, run.cell.num_ranks) not in measured]


def check_resumable(
    previous: ScalingDocument,
    *,
    settings: SweepSettings,
    recipe: Mapping[str, Any],
    commit: str | None,
    machine: Mapping[str, Any],
) -> None:
    """Raises UsageError if further runs would not belong to the same measurement as those of `previous`."""
    changed = [
        name
        for name in SweepSettings.model_fields
        if name not in ("repeats", "overrides")
        and getattr(previous.settings, name) != getattr(settings, name)
    ]
    differs = [f"settings.{name}" for name in changed]
    differs += [f"recipe section [{name}]" for name in recipe if recipe[name] != previous.recipe.get(name)]
    if previous.commit != commit:
        differs.append(f"commit {previous.commit} is now {commit}")
    differs += [
        f"machine's {name} {previous.machine.get(name)} is now {machine[name]}"
        for name in ("cpu", "cores", "devices")
        if machine[name] != previous.machine.get(name)
    ]
    if settings.repeats < max((run.round + 1 for run in previous.runs), default=0):
        differs.append(f"--repeats {settings.repeats} is less than was measured")
    if differs:
        raise UsageError(
            f"--resume: what is asked for is not what was begun ({'; '.join(differs)}): its runs would not belong "
            "together. Give the same options, or another --json to begin anew"
        )
