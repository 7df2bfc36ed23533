"""The contents of a report, and the functions that write it in each format."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jinja2

from hpctrain.errors import UsageError
from hpctrain.launch import SlurmController
from hpctrain.report import tables
from hpctrain.report.conclusions import (
    ACCEPTABLE,
    Conclusion,
    by_axis,
    conclude,
    reduction_limit,
    reduction_table,
)
from hpctrain.report.plots import PALETTE, Plot, plots_of
from hpctrain.report.run_data import read_run
from hpctrain.report.tables import Prices, Row, Table
from hpctrain.slurm import consumed_energy
from hpctrain.storage import replace_file

if TYPE_CHECKING:
    from hpctrain.bench import ScalingDocument, SplitVerdict

# The table of a scaling sweep, and the conclusions from it. Pure.


def sweep_table(sweep: ScalingDocument) -> Table:
    """Returns the measurements of a sweep, one row per size."""
    if sweep.settings.cores is not None:
        return _splits_table(sweep)
    rows = [
        Row(
            name=f"{size.ranks}",
            values=[
                size.nodes,
                f"{size.samples_per_s['median']:,.0f}",
                f"{1e3 * size.step_s['median']:,.2f}",
                _percent(size.efficiency.get("value")),
                _percent(size.efficiency.get("low")),
                _percent(size.efficiency.get("high")),
                _percent(
                    size.seconds["exposed_sync"] / size.seconds["step"] if size.seconds.get("step") else None
                ),
                size.repeats,
            ],
        )
        for size in sweep.sizes
    ]
    chosen = (sweep.fits or {}).get("chosen")
    law = f" Fitted: {chosen} ({sweep.fits['why']})." if sweep.fits and chosen else ""
    return Table(
        name="scaling", title=f"Scaling, {sweep.settings.mode}", head="ranks",
        columns=["nodes", "samples/s", "ms per step", "efficiency", "from", "to", "exposed", "repeats"], rows=rows,
        note=f"Efficiency relative to {_baseline(sweep)}, with t intervals over the rounds." + law,
    )  # fmt: skip


def _splits_table(sweep: ScalingDocument) -> Table:
    columns = ["threads", "samples/s", "ms per step", "speedup", "from", "to", "exposed", "repeats"]
    rows = [
        Row(
            name=f"{size.ranks}",
            values=[
                sweep.settings.threads_of(size.ranks),
                f"{size.samples_per_s['median']:,.0f}",
                f"{1e3 * size.step_s['median']:,.2f}",
                *(_ratio(size.speedup.get(name)) for name in ("value", "low", "high")),
                _percent(size.seconds["exposed_sync"] / size.seconds["step"]),
                size.repeats,
            ],
        )
        for size in sweep.sizes
    ]
    rows += [
        Row(
            name=f"{one.ranks}",
            values=[sweep.settings.threads_of(one.ranks), "failed", *[None] * (len(columns) - 2)],
        )
        for one in sweep.unmeasured_splits()
    ]
    return Table(
        name="scaling", title=f"Splits of {sweep.settings.cores} cores", head="ranks", columns=columns, rows=rows,
        note=f"All splits use the same cores and the same global batch. Speedup relative to {_baseline(sweep)}, with t "
        "intervals over the rounds.",
    )  # fmt: skip


def sweep_title(sweep: ScalingDocument) -> str:
    name = sweep.recipe["run"]["name"]
    if sweep.settings.cores is not None:
        return f"{name}: ranks or threads on {sweep.settings.cores} cores"
    sizes = ", ".join(str(size.ranks) for size in sweep.sizes)
    return f"{name}: {sweep.settings.mode} scaling on {sizes} ranks"


def conclude_sweep(sweep: ScalingDocument) -> list[Conclusion]:
    """Returns the conclusions from a sweep: the efficiency on most ranks, the fitted law, and what limits their use.

    If the sweep compares splits, they are the verdict, and how to start the ranks.
    """
    found = [] if sweep.splits is None else _conclude_splits(sweep, sweep.splits)
    largest = sweep.sizes[-1] if sweep.sizes and sweep.settings.cores is None else None
    value = None if largest is None else largest.efficiency.get("value")
    if largest is not None and value is not None and largest.ranks > sweep.baseline_ranks:
        interval = ""
        if largest.efficiency.get("low") is not None:
            low, high, level = (largest.efficiency[name] for name in ("low", "high", "level"))
            interval = f" ({level:.0%} interval {low:.0%} to {high:.0%})"
        found.append(
            Conclusion(
                text=f"{largest.ranks} ranks reach {value:.0%}{interval} of the samples/s per rank on "
                f"{_baseline(sweep)}, a speedup of {largest.speedup['value']:.2f}.",
                source=f"{largest.repeats} rounds of the sweep, {sweep.settings.steps} steps each", weight=3,
                kind="good" if value >= ACCEPTABLE else "problem",
            )
        )  # fmt: skip
    fits = sweep.fits or {}
    if fits.get("chosen"):
        found.append(
            Conclusion(
                text=f"Of the scaling laws, {fits['chosen']} describes the rates.",
                source=str(fits["why"]),
                weight=2,
                kind="note",
            )
        )
    found += [Conclusion(text=f"{note}.", source="cores of the machine", weight=1) for note in sweep.notes]
    if not sweep.complete:
        found.append(
            Conclusion(text="The sweep is not complete.", source="its document", weight=4, kind="problem")
        )
    return sorted(found, key=lambda conclusion: -conclusion.weight)


def _conclude_splits(sweep: ScalingDocument, verdict: SplitVerdict) -> list[Conclusion]:
    rounds = min((size.repeats for size in sweep.sizes), default=0)
    batch = sweep.recipe["data"]["global_batch"]
    source = f"{rounds} rounds of the sweep, {sweep.settings.steps} steps each, global batch {batch}"
    kind: Literal["good", "problem", "note"] = "note" if verdict.undecided else "good"
    return [
        Conclusion(text=verdict.text, source=source, weight=3, kind="problem" if verdict.failed else kind),
        Conclusion(
            text=verdict.start, source="what the ranks of the sweep were started with", weight=2, kind="note"
        ),
    ]


def _baseline(sweep: ScalingDocument) -> str:
    return sweep.settings.size_name(sweep.baseline_ranks)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


# What stands in a report, before it is written in any format.


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of a report.

    made: the time at which the report was made, as text. conclusions: pairs of a run's label and the conclusions from
    that run; a sweep comes first. notes: texts on what is missing in the report.
    """

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
    slurm: SlurmController | None = None,
    link_bytes_per_s: float | None = None,
    with_plots: bool = True,
) -> Report:
    """Returns the report on these runs. The run with the fewest ranks is the reference for the other runs.

    Args:
        sweep: The document of a scaling sweep to include; None: no sweep.
        prices: The price of a node, for the costs of the runs; None: no costs.
        link_bytes_per_s: The rate of a node's link in one direction; None: the rates that the runs have measured.
        slurm: The connection to Slurm, which is asked for the energy of the runs' jobs.
        with_plots: Whether to draw figures, which needs matplotlib.

    Raises UsageError for a directory that is not a run directory or is given twice; LaunchError if Slurm refuses.
    """
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise UsageError("a run directory is given twice")
    labels = _labels(directories)
    runs = [
        read_run(directory, label=label, link_bytes_per_s=link_bytes_per_s)
        for directory, label in zip(directories, labels, strict=True)
    ]
    runs.sort(key=lambda run: run.num_ranks)
    jobs = [job for run in runs for job in run.jobs()]
    slurm_j = None if slurm is None else consumed_energy(slurm, jobs)
    limits = [reduction_limit(run, link_bytes_per_s=link_bytes_per_s) for run in runs]
    found: list[Table | None] = [
        tables.what_ran(runs), tables.quality(runs), tables.pop(runs), tables.parts(runs),
        *(by_axis(run) for run in runs), reduction_table(runs, limits), tables.step_times(runs),
        sweep_table(sweep) if sweep is not None else None, tables.checkpoints(runs),
        *(tables.other_nodes(run) for run in runs), *(tables.attempts(run) for run in runs),
        *(tables.incidents(run) for run in runs),
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
        notes=[f"{run.label}: no times per rank: {run.why_no_times}" for run in runs if run.why_no_times],
    )


def _labels(directories: Sequence[Path]) -> list[str]:
    """Returns a unique label for each directory: as many of the last parts of its path as are needed."""
    paths = [directory.resolve() for directory in directories]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


# Writes a report: a page, Markdown, or files for papers.


def write_html(report: Report, path: Path) -> None:
    """Writes one HTML page that needs no other file, no network and no JavaScript.

    Raises UsageError if the file cannot be written.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpctrain.report", "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    text = environment.get_template("report.html.j2").render(report=report, palette=PALETTE)
    _write(path, text.encode())


def write_markdown(report: Report, path: Path) -> None:
    """Writes conclusions and tables as GitHub Markdown. Raises UsageError if the file cannot be written."""
    lines = [f"# {report.title}", "", f"Made {report.made}.", ""]
    for label, conclusions in report.conclusions:
        lines += [f"## {label}", "", *(f"- {each.text} ({each.source})" for each in conclusions)]
        lines += ["Nothing stands out, or too little was recorded."] * (not conclusions) + [""]
    for table in report.tables:
        heads = [table.head, *table.columns]
        lines += [f"## {table.title}", "", _line(heads), _line(["---"] * len(heads))]
        for row in table.rows:
            name = "&nbsp;" * 2 * row.indent + row.name + (f", {row.unit}" if row.unit else "")
            lines.append(_line([name, *row.shown()]))
        lines += ["", *([table.note, ""] if table.note else [])]
    _write(path, "\n".join(lines).encode())


def write_report_json(report: Report, path: Path) -> None:
    """Writes conclusions, tables with unrounded numbers, and notes as JSON.

    Raises UsageError if the file cannot be written.
    """
    document = {
        "schema": "hpctrain.report/1", "title": report.title, "made": report.made, "notes": list(report.notes),
        "conclusions": [
            {"of": label, **asdict(each)} for label, conclusions in report.conclusions for each in conclusions
        ],
        "tables": [asdict(table) for table in report.tables],
    }  # fmt: skip
    _write(path, (json.dumps(document, indent=1) + "\n").encode())


def write_csv(report: Report, directory: Path) -> None:
    """Writes each table as a CSV file with unrounded numbers. Raises UsageError if a file cannot be written."""
    for table in report.tables:
        _write(directory / f"{_file_name(table.name)}.csv", _csv(table).encode())


def write_png(report: Report, directory: Path) -> None:
    """Writes each figure as a PNG file on a white background. Raises UsageError if a file cannot be written."""
    for plot in report.plots:
        _write(directory / f"{_file_name(plot.name)}.png", plot.png())


def _csv(table: Table) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([table.head, "unit", *table.columns])
    writer.writerows(
        [row.name, row.unit, *("" if each is None else each for each in row.values)] for row in table.rows
    )
    return written.getvalue()


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _file_name(name: str) -> str:
    return name.replace("/", "-")


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, partial=path.with_name(f".{path.name}.partial"))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
