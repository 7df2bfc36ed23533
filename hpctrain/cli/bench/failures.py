"""`hpctrain bench failures`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpctrain.cli.bench.show import show
from hpctrain.errors import UsageError

SCHEMA = "hpctrain.bench.failures/1"


def failures_command(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that train.")],
    node_hours: Annotated[
        float, typer.Option(min=0.001, help="Mean hours between two failures of one node.")
    ] = 20_000.0,
    save_s: Annotated[
        float, typer.Option("--save-s", min=0.001, help="Seconds for which a checkpoint stops training.")
    ] = 10.0,
    intervals: Annotated[
        Optional[str],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            help="Minutes between checkpoints, separated by commas [default: around Daly's optimum]."
        ),
    ] = None,
    spares: Annotated[
        str, typer.Option(help="Numbers of spare nodes in the job, separated by commas.")
    ] = "0,1,2,4",
    restart_s: Annotated[float, typer.Option(min=0.0, help="Seconds to start the ranks and load.")] = 300.0,
    detect_s: Annotated[float, typer.Option(min=0.0, help="Seconds until a failure is noticed.")] = 60.0,
    repair_hours: Annotated[float, typer.Option(min=0.0, help="Hours until a failed node is back.")] = 4.0,
    queue_hours: Annotated[
        float,
        typer.Option(min=0.0, help="Mean hours in the queue for a new allocation where nodes are missing."),
    ] = 1.0,
    hours: Annotated[float, typer.Option(min=1.0, help="Hours of the job to simulate.")] = 8760.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the failures.")] = 0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="PATH", help="Write all results as JSON."),
    ] = None,
) -> None:
    """Simulate a long job on nodes that fail: time that counts, by checkpoint interval and spare nodes. One process.

    \b
    hpctrain bench failures --nodes 512 --save-s 20
    hpctrain bench failures --nodes 4096 --intervals 5,15,60 --spares 0,8,32 --queue-hours 6

    training: share of the time whose work is kept. lost: work since the last checkpoint, done again.
    """
    from rich.table import Table

    from hpctrain.bench import check_writable, write_document
    from hpctrain.scaling import Job, daly_interval, sweep

    if json_path is not None:
        check_writable(json_path, option="--json")
    job = Job(
        nodes=nodes, node_hours_between_failures=node_hours, interval_s=3600.0, save_s=save_s, restart_s=restart_s,
        detect_s=detect_s, repair_s=3600 * repair_hours, queue_s=3600 * queue_hours,
    )  # fmt: skip
    best_s = daly_interval(save_s, between_failures_s=job.between_failures_s)
    chosen = [best_s * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    if intervals is not None:
        chosen = [60 * value for value in _numbers(intervals, option="--intervals")]
    counts = [int(value) for value in _numbers(spares, option="--spares", least=0.0)]
    found = sweep(job, intervals_s=chosen, spares=counts, hours=hours, seed=seed)
    table = Table(
        title=f"{nodes} nodes for {hours:,.0f} h: a failure every {job.between_failures_s / 3600:.3g} h; Daly's "
        f"interval {best_s / 60:.3g} min",
        title_justify="left",
    )
    for name in (
        "spares",
        "interval, min",
        "training",
        "saving",
        "lost",
        "restarting",
        "in the queue",
        "failures",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for (interval_s, count), outcome in found.items():
        shares = (outcome.trained, outcome.saving, outcome.lost, outcome.down, outcome.queued)
        table.add_row(
            str(count), f"{interval_s / 60:.3g}", *(f"{share:.1%}" for share in shares), str(outcome.failures)
        )
    (best_interval_s, best_count), best = max(found.items(), key=lambda item: item[1].trained)
    note = f"best: {best_count} spare nodes and a checkpoint every {best_interval_s / 60:.3g} min, {best.trained:.1%}"
    show(table, notes=[note])
    if json_path is not None:
        rows = [
            {"interval_s": interval_s, "spares": count, **asdict(outcome)}
            for (interval_s, count), outcome in found.items()
        ]
        document = {
            "schema": SCHEMA,
            "job": asdict(replace(job, interval_s=best_s)),
            "hours": hours,
            "seed": seed,
        }
        write_document(json_path, {**document, "outcomes": rows})


def _numbers(text: str, *, option: str, least: float = 1e-3) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if min(values) < least:
        raise UsageError(f"{option} {text!r}: write numbers of at least {least:g}, separated by commas")
    return values
