"""`hpctrain bench export`: extrap, reframe, jube."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.bench import Harness

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
WarmupSteps = Annotated[int, typer.Option(min=0, help="Steps before them, dropped.")]
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


@export_app.command("reframe")
def reframe_command(
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
    """Write a ReFrame check that measures RECIPE on each number of ranks, one job each.

    \b
    hpctrain bench export reframe recipe.toml --ranks 1,2,4,8 --ranks-per-node 4 -o check.py
    reframe -C site.py -c check.py -r --performance-report
    """
    from hpctrain.bench import Harness

    _export(
        Harness.REFRAME, recipe, ranks=ranks, weak=weak, steps=steps, warmup_steps=warmup_steps, repeats=repeats,
        overrides=overrides, ranks_per_node=ranks_per_node, output=output,
    )  # fmt: skip


@export_app.command("jube")
def jube_command(
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
    """Write a JUBE file that measures RECIPE on each number of ranks; with `-t slurm` one job each.

    \b
    hpctrain bench export jube recipe.toml --ranks 1,2,4,8 --ranks-per-node 4 -o scaling.xml
    jube run -r scaling.xml -t slurm
    """
    from hpctrain.bench import Harness

    _export(
        Harness.JUBE, recipe, ranks=ranks, weak=weak, steps=steps, warmup_steps=warmup_steps, repeats=repeats,
        overrides=overrides, ranks_per_node=ranks_per_node, output=output,
    )  # fmt: skip


def _export(
    harness: Harness,
    recipe: Path,
    *,
    ranks: str,
    weak: bool,
    steps: int,
    warmup_steps: int,
    repeats: int,
    overrides: list[str] | None,
    ranks_per_node: int | None,
    output: Path | None,
) -> None:
    from hpctrain.bench import ExportedSweep, SweepSettings, check_settings, harness_file, parse_ranks
    from hpctrain.run import load_recipe

    loaded = load_recipe(recipe, overrides=overrides or [])
    mode: Literal["strong", "weak"] = "weak" if weak else "strong"
    settings = SweepSettings(
        mode=mode, ranks=list(parse_ranks(ranks)), ranks_per_node=ranks_per_node, steps=steps,
        warmup_steps=warmup_steps, repeats=repeats, seed=0, overrides=overrides or [],
    )  # fmt: skip
    check_settings(settings, batch=loaded.data.global_batch)
    sweep = ExportedSweep(
        name=loaded.run.name,
        recipe=recipe.absolute(),
        folder=Path.cwd(),
        program=_program(),
        settings=settings,
    )
    _write(harness_file(sweep, harness), output)


def _program() -> str:
    """Path of this environment's `hpctrain`: a job may not have it on its PATH."""
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
