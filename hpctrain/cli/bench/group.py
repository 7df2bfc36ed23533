"""The command group `hpctrain bench`, with its commands `allreduce`, `step` and `nodes`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Optional

import typer

from hpctrain.cli.bench.predict import failures_command, predict_command
from hpctrain.cli.bench.scaling import compare_command, export_app, scaling_command
from hpctrain.cli.bench.show import show
from hpctrain.cli.bench.storage import checkpoint_command, data_command
from hpctrain.errors import StoppedEarly, UsageError
from hpctrain.launch import Launcher, identify

INTERRUPTED = 130  # exit code that a shell reports for a command ended by Ctrl-C

bench_app = typer.Typer(
    help="""Measure the speed of this machine and network: reductions, training steps, reading data, checkpoints, nodes.

\b
  hpctrain launch -n 4 -- hpctrain bench allreduce                 every algorithm, fp32 and fp16
  hpctrain bench step examples/digits.toml --ranks 1,2,4           samples/s and efficiency by number of ranks
  hpctrain bench scaling recipe.toml --ranks 1,2,4,8               speedup with intervals over repeats, fitted laws
  hpctrain bench compare before.json after.json                    whether a figure fell by more than its noise
  hpctrain bench export extrap scaling.json                        for Extra-P, ReFrame, JUBE
  hpctrain bench data digits/train                                 samples/s, MB/s, share of the raw read speed
  hpctrain launch -n 2 -- hpctrain bench checkpoint                saving and loading, share of the raw disk's speed
  hpctrain launch -n 8 -- hpctrain bench nodes                     slow nodes, slow links between nodes, slow cores
  hpctrain bench predict --nodes 1..4096 --calibration all.json --calibration runs/a     steps on more nodes
  hpctrain bench failures --nodes 512                              useful time by checkpoint interval and spare nodes
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.command("allreduce")
def allreduce_command(
    sizes: Annotated[
        str,
        typer.Option(
            help="Bytes of float32 gradients: 4KB,1MB or a range 4KB:64MB (factor 4; append :2 for factor 2). "
            "KB is 10^3 bytes, KiB and K are 2^10."
        ),
    ] = "4KB:16MB",
    algorithms: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    wires: Annotated[str, typer.Option(help="Wire formats separated by commas; all: fp32 and fp16.")] = "all",
    backend: Annotated[str, typer.Option(help="auto, horovod, mpi or serial.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the gradients are: auto, cpu, cuda or cuda:0.")] = "cpu",
    repeats: Annotated[
        int, typer.Option(min=1, help="Measured rounds; each measures every combination once.")
    ] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up rounds, which are not counted.")] = 2,
    in_flight: Annotated[
        int,
        typer.Option(
            min=1,
            help="Buckets that are reduced at the same time, each of the given size; their bytes are added up.",
        ),
    ] = 1,
    link_mbit: Annotated[
        Optional[str],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            metavar="MBIT|measure",
            help="Link rate of a node in Mbit/s, from which the lower bound on the time is computed.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the gradients and of the order of the combinations.")
    ] = 0,
    timeout_s: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="If an operation takes longer than this many seconds, the measurement ends with code 6.",
        ),
    ] = 300.0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="PATH", help="Write all results, raw samples too, as JSON."),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="PATH", help="Plot size against bus bandwidth: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Measure all-reduces of gradients. Each process that the launcher started is one rank.

    \b
    hpctrain launch -n 4 -- hpctrain bench allreduce
    mpirun -n 8 hpctrain bench allreduce --sizes 16MiB --algorithms auto,flat,direct --wires fp16,int8
    srun -N 4 --ntasks-per-node=2 hpctrain bench allreduce --link-mbit measure --json all.json --plot all.svg

    A time is that of the slowest rank; the table has the median and, in brackets, the quartiles. algbw is bytes / time,
    busbw is algbw * 2(N-1)/N, as in nccl-tests. Combinations that cannot run here are listed below the table.
    """
    _stop_without_a_trace()
    from hpctrain.bench import (
        ALGORITHMS,
        AllReduceAsked,
        MeasurementProgress,
        ReducersHere,
        all_reduce_document,
        all_reduce_on,
        all_reduce_table,
        check_plot,
        check_writable,
        find_link,
        nccl_to_start,
        parse_link,
        parse_names,
        parse_sizes,
        plot_all_reduce,
        write_document,
    )
    from hpctrain.reduce import AUTO_WIRES, wire_names
    from hpctrain.run import init, working_commit

    # Checked before MPI starts: every rank finds the same mistakes in its options.
    asked = AllReduceAsked(
        sizes_bytes=parse_sizes(sizes),
        algorithms=parse_names(algorithms, option="--algorithms", valid=ALGORITHMS, usual=ALGORITHMS),
        wires=parse_names(wires, option="--wires", valid=wire_names(), usual=AUTO_WIRES),
        repeats=repeats, warmup=warmup, in_flight=in_flight, seed=seed,
    )  # fmt: skip
    # `all` measures the NCCL algorithm that Horovod's environment variables select, if any.
    nccl = None if algorithms.strip() == "all" else nccl_to_start(asked.algorithms)
    parse_link(link_mbit)
    if plot is not None:
        check_plot(plot)
    is_first = identify(os.environ, socket.gethostname()).rank == 0
    if is_first:
        for path, option in ((json_path, "--json"), (plot, "--plot")):
            if path is not None:
                check_writable(path, option=option)
    commit = working_commit() if is_first else None  # runs git: forking is unsafe once MPI has started
    with init(backend=backend, device=device, timeout_s=timeout_s, algorithm=nccl) as session:
        progress = MeasurementProgress(what="bench allreduce", shown=is_first)
        link = find_link(link_mbit, session=session)
        reducers = ReducersHere(session, gradient_bytes=in_flight * sum(asked.sizes_bytes), nccl=nccl)
        found = all_reduce_on(session, asked, reducers=reducers, link=link, progress=progress)
        document = all_reduce_document(session, asked, found, reducers=reducers, link=link, commit=commit)
        if is_first:
            progress.end()
            title = (
                f"all-reduce of float32 gradients: {session.topology.describe()}, {session.world.backend}, "
                f"median of {repeats}" + (f"; link {link.describe()}" if link is not None else "")
            )
            show(all_reduce_table(found.rows, title=title), notes=[*reducers.lines(), *found.notes])
            if json_path is not None:
                write_document(json_path, document)
            if plot is not None and session.world_size > 1:
                plot_all_reduce(
                    found.rows, plot, topology=session.topology, title=title,
                    link_bytes_per_s=None if link is None else link.bytes_per_s,
                )  # fmt: skip
            elif plot is not None:
                typer.echo("no plot: one rank sends nothing, so there is no bus bandwidth", err=True)


@bench_app.command("step")
def step_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,4",
    modes: Annotated[
        str,
        typer.Option(
            help="strong: the recipe's global batch, shared by the ranks. weak: that batch for each rank."
        ),
    ] = "strong,weak",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 50,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Warm-up steps, which are not counted.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."
        ),
    ] = None,
    ranks_per_node: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Ranks on each node. On one machine: emulate nodes of this many ranks."),
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option(help="auto: srun inside a Slurm allocation, else mpirun.")
    ] = Launcher.AUTO,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            help="CPU threads of each rank, the same for every number of ranks "
            "[default: run.threads_per_rank, or the cores per rank at the largest number of ranks].",
        ),
    ] = None,
    scratch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder for the runs' files, visible on all nodes; they are removed afterwards "
            "[default: the temporary folder; in a Slurm job run.directory or its nearest existing parent]."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the runs.")] = 0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="PATH", help="Write all results, every step too, as JSON."),
    ] = None,
) -> None:
    """Measure training steps of RECIPE by number of ranks. Launches the runs itself, in shuffled order.

    \b
    hpctrain bench step examples/digits.toml --ranks 1,2
    hpctrain bench step recipe.toml --ranks 1,2,4,8 --modes weak --set reduction.wire=fp16 --json steps.json
    sbatch --ntasks=8 --wrap "hpctrain bench step recipe.toml --ranks 1,2,4,8"

    The recipe's own run directory is not touched. Efficiency is samples/s per rank, relative to the smallest number of
    ranks. exposed: time in which a rank is blocked by communication.
    """
    from hpctrain.bench import StepAsked, check_writable, parse_modes, parse_ranks
    from hpctrain.run import load_recipe

    asked = StepAsked(
        ranks=parse_ranks(ranks), modes=parse_modes(modes), steps=steps, warmup_steps=warmup_steps, repeats=repeats,
        seed=seed,
    )  # fmt: skip
    if json_path is not None:
        check_writable(json_path, option="--json")
    if scratch is not None and not scratch.is_dir():
        raise UsageError(f"--scratch {scratch} is not a directory")
    loaded = load_recipe(recipe, overrides=overrides or [])

    from hpctrain.bench import bench_step

    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        table = bench_step(
            loaded, asked, recipe_path=recipe, ranks_per_node=ranks_per_node, launcher=launcher, threads=threads,
            scratch=scratch, json_path=json_path,
        )  # fmt: skip
    except (StoppedEarly, KeyboardInterrupt):
        typer.echo("hpctrain bench: stopped; the ranks have ended, and nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    show(table, notes=[])


@bench_app.command("nodes")
def nodes_command(
    device: Annotated[
        str, typer.Option(help="Whose memory and arithmetic: auto, cpu, cuda or cuda:0.")
    ] = "auto",
    timeout_s: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="If an operation takes longer than this many seconds, the measurement ends with code 6.",
        ),
    ] = 300.0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="PATH", help="Write all results as JSON."),
    ] = None,
) -> None:
    """Measure the links between all pairs of nodes and each rank's memory and arithmetic, and name what is slow.

    \b
    srun -N 16 --ntasks-per-node=4 hpctrain bench nodes --json nodes.json
    mpirun -n 8 hpctrain bench nodes

    Each node is in one pair at a time, and many pairs are measured at once: nodes - 1 rounds. Rates of a link are those
    of messages of 4 MiB that travel there and back; memory and arithmetic are measured on all ranks at once.
    """
    _stop_without_a_trace()
    from hpctrain.bench import check_writable, write_document
    from hpctrain.cli.bench.nodes import nodes_table
    from hpctrain.run import init, probe_nodes

    is_first = identify(os.environ, socket.gethostname()).rank == 0
    if is_first and json_path is not None:
        check_writable(json_path, option="--json")
    with init(device=device, timeout_s=timeout_s) as session:
        found = probe_nodes(session)
        if is_first:
            lines = [finding.describe() for finding in found.findings] or ["nothing is slow"]
            show(nodes_table(found, session.topology), notes=lines)
            if json_path is not None:
                write_document(json_path, found.document)


bench_app.command("scaling")(scaling_command)
bench_app.command("compare")(compare_command)
bench_app.add_typer(export_app, name="export")
bench_app.command("data")(data_command)
bench_app.command("checkpoint")(checkpoint_command)
bench_app.command("predict")(predict_command)
bench_app.command("failures")(failures_command)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stop_without_a_trace() -> None:
    """Makes SIGINT, SIGTERM and SIGUSR1 end this rank without a traceback.

    `hpctrain launch` sends SIGUSR1 to the ranks after Ctrl-C.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if identify(os.environ, socket.gethostname()).rank == 0:
            print("hpctrain bench: stopped; nothing was written", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # the launcher ends the other ranks, which received the signal too

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)
