"""The commands `hpctrain bench scaling`, `compare` and `export`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, Optional, cast

import typer

from hpctrain.cli.bench.show import show
from hpctrain.errors import ExitCode, StoppedEarly, UsageError
from hpctrain.launch import Launcher

if TYPE_CHECKING:
    from hpctrain.bench import ScalingDocument, SweepSettings
    from hpctrain.run import Recipe

# `hpctrain bench scaling`.


def scaling_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
    ranks: Annotated[
        Optional[str],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(help="Numbers of ranks, separated by commas [default: 1,2,4]."),
    ] = None,
    nodes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Instead of --ranks: numbers of nodes; each has --ranks-per-node ranks."),
    ] = None,
    weak: Annotated[
        bool,
        typer.Option(
            "--weak",
            help="Weak scaling: the recipe's global batch for each rank. Default: strong, the batch is shared.",
        ),
    ] = False,
    split_cores: Annotated[
        bool,
        typer.Option(
            "--split-cores",
            help="Few ranks with many threads, or many with few? Measures the splits of a node's cores into ranks x "
            "threads, for the recipe's global batch: all, or those with --ranks.",
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 50,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Warm-up steps, which are not counted.")] = 10,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds, at least 5; each has one run of every size.")
    ] = 5,
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
    jobs: Annotated[
        bool, typer.Option("--jobs", help="Submit a Slurm job of its own size for each run, from [slurm].")
    ] = False,
    launcher: Annotated[
        Launcher, typer.Option(help="auto: srun inside a Slurm allocation, else mpirun.")
    ] = Launcher.AUTO,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="CPU threads of each rank, the same for every size."),
    ] = None,
    scratch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for the runs' files, visible on all nodes; they are removed afterwards."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the sizes in each round.")] = 0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--json",
            metavar="PATH",
            help="The document [default: scaling-NAME-strong.json, -weak.json or -splits.json].",
        ),
    ] = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            help="Also write the report of the sweep as a page, as `hpctrain report` does. The run directory of the "
            "last run of each size is kept for it, in a folder next to the document.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the sweep in the document, if there is one.")
    ] = False,
    at_most: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, metavar="ROUNDS", help="End after this many more rounds; --resume continues."),
    ] = None,
) -> None:
    """Measure how training steps of RECIPE scale with the number of ranks, with intervals and fitted laws.

    \b
    hpctrain bench scaling examples/digits.toml --ranks 1,2
    hpctrain bench scaling recipe.toml --ranks 1,2,4,8 --weak --repeats 8
    salloc --nodes=4 hpctrain bench scaling recipe.toml --nodes 1,2,4 --ranks-per-node 8
    hpctrain bench scaling recipe.toml --nodes 1,2,4 --ranks-per-node 8 --jobs
    hpctrain bench scaling recipe.toml --split-cores                        ranks or threads?
    hpctrain bench scaling recipe.toml --ranks 1,2,4,8 --report report.html
    hpctrain bench scaling recipe.toml --ranks 1,2,4,8 --resume             after Ctrl-C, or a run that failed

    Each round has one run of every size, in shuffled order. The document is written after each run. Exit codes: 0; 75
    stopped, --resume continues; 2 usage; 3 the runs saw different samples; else that of the run that failed (with
    --split-cores after the other splits have been measured).
    """
    from hpctrain.scaling import check_scipy

    check_scipy()
    from hpctrain.bench import SweepPlace, check_writable, measure_sweep, scaling_lines, scaling_table
    from hpctrain.run import load_recipe

    loaded = load_recipe(recipe, overrides=overrides or [])
    if scratch is not None and not scratch.is_dir():
        raise UsageError(f"--scratch {scratch} is not a directory")
    mode = "weak" if weak else "strong"
    path = json_path or Path(f"scaling-{loaded.run.name}-{'splits' if split_cores else mode}.json")
    check_writable(path, option="--json")
    if report is not None:
        _check_report(report)
    kept_runs = path.with_name(f"{path.stem}-runs")
    settings = _settings(
        loaded, mode=mode, ranks=ranks, nodes=nodes, ranks_per_node=ranks_per_node, steps=steps,
        warmup_steps=warmup_steps, repeats=repeats, seed=seed, threads=threads, jobs=jobs, overrides=overrides or [],
    )  # fmt: skip
    if split_cores:
        settings = _split(settings, loaded, given=ranks, launcher=launcher)
    # The report compares runs with that on the fewest ranks, as if all ranks had the same threads.
    keeps = report is not None and not split_cores
    place = SweepPlace(
        recipe_path=recipe, document=path, launcher=launcher, scratch=scratch, keep=kept_runs if keeps else None,
    )  # fmt: skip
    try:
        with _signals_interrupt():
            document = measure_sweep(loaded, settings, place=place, resume=resume, at_most_rounds=at_most)
    except (StoppedEarly, KeyboardInterrupt):
        kept = f"what was measured is in {path}" if path.exists() else "nothing was measured yet"
        typer.echo(
            f"hpctrain bench scaling: stopped; the ranks have ended; {kept}; the same command with --resume continues",
            err=True,
        )
        raise typer.Exit(ExitCode.STOPPED_EARLY) from None
    notes = [*scaling_lines(document), f"document: {path}"]
    if report is not None:
        notes.append(_write_report(report, document, kept_runs if keeps else None))
    show(scaling_table(document), notes=notes)
    if document.splits is not None and document.splits.failed:
        raise typer.Exit(document.splits.failed[0].exit_code)


def _check_report(path: Path) -> None:
    from hpctrain.bench import check_writable
    from hpctrain.report import check_matplotlib

    check_matplotlib("--report needs")
    check_writable(path, option="--report")


def _write_report(path: Path, document: ScalingDocument, kept_runs: Path | None) -> str:
    """Writes the page from the sweep and its kept runs. Returns a note for the user."""
    from hpctrain.report import make_report, write_html

    if kept_runs is None:
        write_html(make_report([], sweep=document), path)
        return f"report: {path}"
    runs = [kept_runs / f"ranks-{size.ranks}" for size in document.sizes]
    found = [run for run in runs if (run / "environment.json").is_file()]
    write_html(make_report(found, sweep=document), path)
    missing = (
        ""
        if len(found) == len(runs)
        else f"; only {len(found)} of {len(runs)} sizes have a run in {kept_runs}"
    )
    return f"report: {path}{missing}"


def _settings(
    recipe: Recipe,
    *,
    mode: str,
    ranks: str | None,
    nodes: str | None,
    ranks_per_node: int | None,
    steps: int,
    warmup_steps: int,
    repeats: int,
    seed: int,
    threads: int | None,
    jobs: bool,
    overrides: list[str],
) -> SweepSettings:
    from hpctrain.bench import SweepSettings, parse_ranks, ranks_of_nodes

    if ranks is not None and nodes is not None:
        raise UsageError("--ranks and --nodes both give the sizes: give one of them")
    per_node = ranks_per_node
    if per_node is None and (jobs or nodes is not None) and "slurm" in recipe.model_fields_set:
        per_node = recipe.slurm.tasks_per_node
    counts = None if nodes is None else list(parse_ranks(nodes, option="--nodes"))
    return SweepSettings(
        mode=cast(Literal["strong", "weak"], mode),
        ranks=list(parse_ranks(ranks or "1,2,4"))
        if counts is None
        else ranks_of_nodes(counts, ranks_per_node=per_node),
        nodes=counts,
        ranks_per_node=per_node,
        steps=steps,
        warmup_steps=warmup_steps,
        repeats=repeats,
        seed=seed,
        threads_per_rank=threads or recipe.run.threads_per_rank,
        start="jobs" if jobs else "launch",
        overrides=overrides,
    )


def _split(
    settings: SweepSettings, recipe: Recipe, *, given: str | None, launcher: Launcher
) -> SweepSettings:
    """Returns the settings for --split-cores. `given` is the option --ranks. Raises UsageError if they do not fit."""
    from hpctrain.bench import cores_to_split, ranks_of_splits
    from hpctrain.launch import survey_machine

    if recipe.run.threads_per_rank is not None:
        raise UsageError(
            f"--split-cores: run.threads_per_rank = {recipe.run.threads_per_rank} would give every rank as many "
            "threads in each split: remove it from the recipe"
        )
    others = {
        "--weak": settings.mode == "weak", "--nodes": settings.nodes is not None, "--jobs": settings.start == "jobs",
        "--ranks-per-node": settings.ranks_per_node is not None, "--threads": settings.threads_per_rank is not None,
    }  # fmt: skip
    wrong = [option for option, is_given in others.items() if is_given]
    if wrong:
        raise UsageError(
            f"--split-cores divides the cores of one node over its ranks, for one global batch: leave out {wrong[0]}"
            + " and call it inside a job (salloc --nodes=1)" * (wrong[0] == "--jobs")
        )
    cores = cores_to_split(machine=survey_machine(), launcher=launcher, environ=os.environ)
    ranks = ranks_of_splits(cores, asked=None if given is None else settings.ranks)
    # All ranks of a split are on one node, also in an allocation of several.
    return settings.model_copy(update={"ranks": ranks, "cores": cores, "ranks_per_node": cores})


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP act like Ctrl-C within the `with` block, even while no ranks run."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# `hpctrain bench compare`.


FELL = 1  # exit code, as of diff(1)


def compare_command(
    old: Annotated[Path, typer.Argument(help="A document of `bench scaling` or `bench step`.")],
    new: Annotated[
        Path, typer.Argument(help="A document of the same kind and sizes, to compare with the first.")
    ],
    threshold: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Relative decrease that is tolerated, such as 0.02.")
    ] = 0.0,
    alpha: Annotated[
        float,
        typer.Option(min=0.0001, max=0.5, help="Probability of a false alarm among all figures together."),
    ] = 0.05,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of the random permutations, if there are too many to try them all."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the samples/s of two measurements, and end with 1 if a figure fell by more than its noise.

    \b
    hpctrain bench compare before.json after.json
    hpctrain bench compare before.json after.json --threshold 0.02 --json

    An exact permutation test over the rounds. Measure both in turns (`bench scaling --at-most 1 --resume`), so that a
    change of the machine affects both alike. Exit codes: 0 nothing fell; 1 a figure fell; 2 they cannot be
    compared.
    """
    from hpctrain.scaling import check_scipy

    check_scipy()
    from hpctrain.bench import compare_documents, comparison_lines, comparison_table

    found = compare_documents(old, new, threshold=threshold, alpha=alpha, seed=seed)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        show(comparison_table(found), notes=comparison_lines(found))
    if found.comparison.fell:
        raise typer.Exit(FELL)


# `hpctrain bench export`: extrap, reframe, jube.


export_app = typer.Typer(
    help="""Write measurements and benchmarks for other tools.

\b
  hpctrain bench export extrap scaling.json -o scaling.jsonl         measurements for Extra-P
  hpctrain bench export reframe recipe.toml --ranks 1,2,4,8 -o check.py
  hpctrain bench export jube recipe.toml --ranks 1,2,4,8 -o scaling.xml
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Output = Annotated[
    Optional[Path],  # noqa: UP045  (typer evaluates this on Python 3.10)
    typer.Option("-o", "--output", metavar="PATH", help="File to write [default: standard output]."),
]
RecipePath = Annotated[Path, typer.Argument(help="The recipe, a TOML file.")]
Ranks = Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")]
Weak = Annotated[bool, typer.Option("--weak", help="Weak scaling: the recipe's global batch for each rank.")]
Steps = Annotated[int, typer.Option(min=1, help="Measured steps of each run.")]
WarmupSteps = Annotated[int, typer.Option(min=0, help="Warm-up steps, which are not counted.")]
Repeats = Annotated[int, typer.Option(min=5, help="Runs of each size.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."),
]
RanksPerNode = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, help="Ranks on each node."),
]


@export_app.command("extrap")
def extrap_command(
    document: Annotated[Path, typer.Argument(help="A document of `hpctrain bench scaling`.")],
    output: Output = None,
) -> None:
    """Write the measurements of a sweep as JSON lines, which Extra-P models.

    \b
    hpctrain bench export extrap scaling-digits-strong.json -o scaling.jsonl
    extrap --json scaling.jsonl
    """
    from hpctrain.bench import extrap_lines, extrap_notes, read_scaling_document

    found = read_scaling_document(document)
    if not found.runs:
        raise UsageError(f"{document} has no runs yet")
    _write("\n".join(extrap_lines(found)) + "\n", output)
    for note in extrap_notes(found):
        typer.echo(f"hpctrain bench export: {note}", err=True)


def _export_command(name: str, help: str) -> None:
    """Adds the command `hpctrain bench export NAME`, which writes a sweep as a file for the harness of this name."""

    def command(
        recipe: RecipePath,
        ranks: Ranks = "1,2,4",
        weak: Weak = False,
        steps: Steps = 50,
        warmup_steps: WarmupSteps = 10,
        repeats: Repeats = 5,
        overrides: Overrides = None,
        ranks_per_node: RanksPerNode = None,
        output: Output = None,
    ) -> None:
        from hpctrain.bench import (
            ExportedSweep,
            Harness,
            SweepSettings,
            check_settings,
            harness_file,
            parse_ranks,
        )
        from hpctrain.run import load_recipe

        loaded = load_recipe(recipe, overrides=overrides or [])
        settings = SweepSettings(
            mode="weak" if weak else "strong", ranks=list(parse_ranks(ranks)), ranks_per_node=ranks_per_node,
            steps=steps, warmup_steps=warmup_steps, repeats=repeats, seed=0, overrides=overrides or [],
        )  # fmt: skip
        check_settings(settings, batch=loaded.data.global_batch)
        sweep = ExportedSweep(
            name=loaded.run.name,
            recipe=recipe.absolute(),
            folder=Path.cwd(),
            program=_program(),
            settings=settings,
        )
        _write(harness_file(sweep, Harness(name)), output)

    export_app.command(name, help=help)(command)


_export_command(
    "reframe",
    """Write a ReFrame check that measures RECIPE on each number of ranks, one job each.

    \b
    hpctrain bench export reframe recipe.toml --ranks 1,2,4,8 --ranks-per-node 4 -o check.py
    reframe -C site.py -c check.py -r --performance-report
    """,
)
_export_command(
    "jube",
    """Write a JUBE file that measures RECIPE on each number of ranks; with `-t slurm` one job each.

    \b
    hpctrain bench export jube recipe.toml --ranks 1,2,4,8 --ranks-per-node 4 -o scaling.xml
    jube run -r scaling.xml -t slurm
    """,
)


def _program() -> str:
    """Returns the path of this environment's `hpctrain`, since a job may not have it on its PATH."""
    installed = Path(sys.executable).parent / "hpctrain"
    return str(installed) if installed.exists() else shutil.which("hpctrain") or "hpctrain"


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from error
