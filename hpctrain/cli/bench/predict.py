"""The commands `hpctrain bench predict` and `failures`, which predict by models."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpctrain.cli.bench.show import show
from hpctrain.errors import UsageError
from hpctrain.reduce import CODEC_WIRES, listed_wires

# `hpctrain bench predict`.


def predict_command(
    calibration: Annotated[
        list[Path],
        typer.Option(
            help="A document of `hpctrain bench allreduce --json`, or the directory of a training run on one node or "
            "on a pair. May be repeated; at least one document and one run on one node are needed."
        ),
    ],
    nodes: Annotated[
        str, typer.Option(help="Numbers of nodes: 1,2,8 or 1..4096, the powers of two in the range.")
    ] = "1..4096",
    link: Annotated[
        Optional[str],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            metavar="RATE", help="Nominal link rate of a node, such as 100gbit [default: the calibration's]."
        ),
    ] = None,
    ranks_per_node: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Ranks on each node [default: cores / threads of the run]."),
    ] = None,
    algorithm: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="As reduction.algorithm of a recipe, except auto [default: the run's; hierarchical for a run on one "
            "rank]."
        ),
    ] = None,
    wire: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"{listed_wires(CODEC_WIRES)} [default: the run's]."),
    ] = None,
    bucket_mb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, help="Size of the buckets in MB [default: the run's]."),
    ] = None,
    batch_per_rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Samples per rank and step [default: the run's]."),
    ] = None,
    sample_bytes: Annotated[
        float, typer.Option(min=0.0, help="Bytes per sample that a rank reads from the shared filesystem.")
    ] = 0.0,
    storage: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="RATE", help="Rate of the shared filesystem for all nodes together, such as 400gbit."
        ),
    ] = None,
    nodes_share_cores: Annotated[
        int,
        typer.Option(min=1, help="Nodes that share the cores of one machine, as in a cluster for tests."),
    ] = 1,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--json", metavar="PATH", help="Write constants, standard errors and predictions as JSON."
        ),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="PATH", help="Plot efficiency and samples/s by nodes: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Predict step time and efficiency on more nodes from measurements on few. Runs as one process, in seconds.

    \b
    srun -N 2 --ntasks-per-node=4 hpctrain bench allreduce --link-mbit 100000 --json pair.json
    hpctrain train recipe.toml --set run.steps=200
    hpctrain bench predict --calibration pair.json --calibration runs/a --nodes 1..4096 --link 100gbit
    hpctrain bench predict --calibration pair.json --calibration runs/a --wire fp16 --bucket-mb 16 --plot curve.svg

    The batch of each rank stays the same. efficiency: samples/s per rank, relative to one rank alone. binds: the
    resource that limits the step most, and the share of the step that would be saved without its limit. 90 %: interval
    from the errors of the fitted constants.
    """
    from hpctrain.bench import check_plot, check_writable, write_document
    from hpctrain.scaling import (
        Layout,
        Storage,
        calibrate_model,
        parse_nodes,
        parse_rate,
        plot_predictions,
        predicted_rows,
        prediction_document,
        prediction_table,
    )

    counts = parse_nodes(nodes)
    rate = None if link is None else parse_rate(link)
    reading = Storage() if storage is None else Storage(bytes_per_s=parse_rate(storage))
    for path in calibration:
        if not path.exists():
            raise UsageError(f"--calibration {path} does not exist")
    if json_path is not None:
        check_writable(json_path, option="--json")
    if plot is not None:
        check_plot(plot)
        check_writable(plot, option="--plot")
    found = calibrate_model(calibration, link_bytes_per_s=rate, cores_shared_by=nodes_share_cores)
    scenario = found.scenario
    workload = scenario.workload
    if batch_per_rank is not None:
        workload = workload.with_samples(batch_per_rank)
    if bucket_mb is not None:
        workload = workload.with_bucket_bytes(1e6 * bucket_mb)
    workload = replace(workload, input_bytes=sample_bytes * workload.samples)
    setup = replace(
        scenario.setup, algorithm=algorithm or scenario.setup.algorithm, wire=wire or scenario.setup.wire
    )
    found = found.with_scenario(replace(scenario, workload=workload, setup=setup, storage=reading))
    per_node = ranks_per_node or max(1, found.node.cores // found.node.threads)
    rows = predicted_rows(found, [Layout(count, per_node) for count in counts])
    at = (
        "links of unknown rate"
        if found.link_bytes_per_s is None
        else f"{8 * found.link_bytes_per_s / 1e9:g} Gbit/s"
    )
    title = (
        f"predicted: {per_node} rank{'s' if per_node > 1 else ''} per node, {workload.samples} samples each, "
        f"{setup.algorithm}, {setup.wire} on the wire, {workload.gradient_bytes / 1e6:.3g} MB of gradients, {at}"
    )
    fitted = f"fit of the all-reduces: residual {found.fit.residual:.1%}"
    show(prediction_table(found, rows, title=title), notes=[*found.notes, fitted])
    if json_path is not None:
        write_document(json_path, prediction_document(found, rows))
    if plot is not None:
        plot_predictions(rows, plot, title=title)


# `hpctrain bench failures`.


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
    restart_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds to start the ranks and load the checkpoint.")
    ] = 300.0,
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
    """Simulate a long job on nodes that fail: share of useful time by checkpoint interval and spares. One process.

    \b
    hpctrain bench failures --nodes 512 --save-s 20
    hpctrain bench failures --nodes 4096 --intervals 5,15,60 --spares 0,8,32 --queue-hours 6

    training: share of the time in which the work is kept. lost: share of the work since the last checkpoint before each
    failure, which is done again.
    """
    from rich.table import Table

    from hpctrain.bench import check_writable, write_document
    from hpctrain.checkpoint import daly_interval_s
    from hpctrain.scaling import SimulatedJob, sweep

    if json_path is not None:
        check_writable(json_path, option="--json")
    job = SimulatedJob(
        nodes=nodes, node_hours_between_failures=node_hours, interval_s=3600.0, save_s=save_s, restart_s=restart_s,
        detect_s=detect_s, repair_s=3600 * repair_hours, queue_s=3600 * queue_hours,
    )  # fmt: skip
    best_s = daly_interval_s(cost_s=save_s, failure_every_s=job.between_failures_s)
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
