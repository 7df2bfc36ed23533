"""What stands in a report, before it is written in any format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.report import tables
from hpctrain.report.by_axis import by_axis
from hpctrain.report.conclusions import Conclusion, conclude
from hpctrain.report.plots import Plot, plots_of
from hpctrain.report.prices import Prices
from hpctrain.report.reduction_limit import reduction_limit, reduction_table
from hpctrain.report.run_data import read_run
from hpctrain.report.sweep import conclude_sweep, sweep_table, sweep_title
from hpctrain.report.table import Table
from hpctrain.slurm import Controller, consumed_energy

if TYPE_CHECKING:
    from hpctrain.bench import ScalingDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """conclusions: by label of the run they are about."""

    title: str
    made: str
    conclusions: Sequence[tuple[str, Sequence[Conclusion]]]
    tables: Sequence[Table]
    plots: Sequence[Plot]
    notes: Sequence[str]


def make_report(
    directories: Sequence[Path],
    *,
    sweep: ScalingDocument | None = None,
    prices: Prices | None = None,
    slurm: Controller | None = None,
    link_bytes_per_s: float | None = None,
    with_plots: bool = True,
) -> Report:
    """Returns the report of these runs. The one with the fewest ranks is what the others are compared with.

    link_bytes_per_s: of a node, one direction; None: what the runs have measured. slurm: is asked for the energy of the
    runs' jobs. with_plots: figures need matplotlib.

    Raises UsageError for a directory that is no run's, or that is given twice, LaunchError if Slurm refuses.
    """
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise UsageError("a run directory is given twice")
    labels = _labels(directories)
    runs = [read_run(directory, label=label) for directory, label in zip(directories, labels, strict=True)]
    runs.sort(key=lambda run: run.num_ranks)
    jobs = [job for run in runs for job in run.jobs()]
    slurm_j = None if slurm is None else consumed_energy(slurm, jobs)
    limits = [reduction_limit(run, link_bytes_per_s=link_bytes_per_s) for run in runs]
    found: list[Table | None] = [
        tables.what_ran(runs), tables.quality(runs), tables.pop(runs), tables.parts(runs),
        *(by_axis(run) for run in runs), reduction_table(runs, limits), tables.step_times(runs),
        sweep_table(sweep) if sweep is not None else None, tables.checkpoints(runs),
        *(tables.attempts(run) for run in runs), *(tables.incidents(run) for run in runs),
        tables.resources(runs, prices=prices, slurm_j=slurm_j),
    ]  # fmt: skip
    conclusions = [
        (run.label, conclude(run, reference=runs[0], limit=limit))
        for run, limit in zip(runs, limits, strict=True)
    ]
    if sweep is not None:
        conclusions.insert(0, ("the sweep", conclude_sweep(sweep)))
    return Report(
        title=", ".join(labels) if sweep is None else sweep_title(sweep),
        made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        conclusions=conclusions,
        tables=[table for table in found if table is not None and table.columns],
        plots=plots_of(runs, sweep=sweep, limits=limits) if with_plots else (),
        notes=[
            f"{run.label}: no times of single ranks: {run.why_no_times}" for run in runs if run.why_no_times
        ],
    )


def _labels(directories: Sequence[Path]) -> list[str]:
    """Returns a name for each: its last part, or as much of the path as distinguishes it from the others."""
    paths = [directory.resolve() for directory in directories]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]
