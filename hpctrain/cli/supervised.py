"""Supervises a command, for `hpctrain supervise` and `hpctrain launch --elastic`: what to run, and in what range."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.supervise import Elastic, RestartLimits

# Longer than the checks of nodes between two attempts take.
_SERVER_LINGERS_S = 120.0
DEFAULT_WAIT_S = 300.0
DEFAULT_START_WITHIN_S = 300.0


def supervise(
    command: Sequence[str],
    *,
    num_ranks: int | None = None,
    elastic: str | None = None,
    elastic_wait_s: float = DEFAULT_WAIT_S,
    hostfile: Path | None = None,
    ranks_per_node: int | None = None,
    run_directory: Path | None = None,
    limits: RestartLimits | None = None,
    start_within_s: float = DEFAULT_START_WITHIN_S,
    check: Path | None = None,
    check_paths: Sequence[Path] = (),
    check_timeout_s: float = 30.0,
    fork_server: bool | None = None,
) -> int:
    """Supervises `command`, and returns its exit code. The arguments are the options of `hpctrain supervise`.

    Raises UsageError if the options do not fit together, and the errors of `Supervisor.run`.
    """
    from hpctrain.launch import ForkServer, refuse_program_on_stdin, resolve_command, survey_machine
    from hpctrain.supervise import RestartLimits, SupervisedRun, Supervisor, find_allocation

    if elastic is None and num_ranks is None:
        raise UsageError("the number of ranks is not known: give -n NUMBER, or --elastic MIN:MAX")
    refuse_program_on_stdin(command)  # a second start would find it read
    allocation = find_allocation(os.environ)
    recipe = read_train_command(command)
    directory = run_directory or (recipe.run_directory if recipe is not None else None)
    if directory is None:
        raise UsageError(
            "where the run keeps its records is not known: give --run-directory, or a command of the form "
            "`hpctrain train RECIPE`"
        )
    found = None
    if elastic is not None:
        found = read_elastic(
            elastic, num_ranks=num_ranks, recipe=recipe, wait_s=elastic_wait_s, hostfile=hostfile,
            in_slurm=allocation.in_slurm,
        )  # fmt: skip
        num_ranks = found.range.most
    elif hostfile is not None:
        raise UsageError("--hostfile says how many slots an elastic run has: give --elastic MIN:MAX too")
    assert num_ranks is not None
    per_node = ranks_per_node or _ranks_per_node(
        os.environ, num_ranks=num_ranks, num_nodes=len(allocation.nodes)
    )
    run = SupervisedRun(
        command=[resolve_command(command[0]), *command[1:]],
        again=() if recipe is None else ("--resume", "auto"),
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        directory=directory.absolute(),
        checkpoints=(directory / "checkpoints" if recipe is None else recipe.checkpoints).absolute(),
        start_within_s=None if recipe is None else start_within_s,
        check_paths=[str(path.absolute()) for path in (*check_paths, *(recipe.paths if recipe else ()))],
        check_script=None if check is None else str(check.absolute()),
        check_timeout_s=check_timeout_s,
        fork_server=None
        if fork_server is False
        else ForkServer(lingers_s=_SERVER_LINGERS_S, by_default=fork_server is None),
        elastic=found,
    )
    supervisor = Supervisor(
        run,
        allocation=allocation,
        limits=limits or RestartLimits(),
        machine=survey_machine(),
        environ=os.environ,
    )
    return supervisor.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """What the supervisor needs to know of a command `hpctrain train RECIPE ...`.

    checkpoints: folder of the checkpoints. paths: paths that the ranks read: the recipe and the datasets. document:
    content of the recipe, with the command's overrides.
    """

    run_directory: Path
    checkpoints: Path
    paths: tuple[Path, ...]
    document: Mapping[str, Any]


def read_train_command(command: Sequence[str]) -> TrainCommand | None:
    """Returns what the supervisor needs to know of `hpctrain train RECIPE ...`; None for any other command.

    `python -m hpctrain` counts as `hpctrain`. Raises RecipeError if the recipe cannot be read.
    """
    if Path(command[0]).name.startswith("python") and list(command[1:3]) == ["-m", "hpctrain"]:
        command = command[2:]
    if [Path(word).name for word in command[:2]] != ["hpctrain", "train"]:
        return None
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    parser.add_argument("recipe", type=Path, nargs="?")
    try:
        found, _ = parser.parse_known_args(command[2:])
    except argparse.ArgumentError:
        return None
    if found.recipe is None:
        return None
    from hpctrain.run import read_recipe_document

    document = read_recipe_document(found.recipe, overrides=found.set)
    directory = _text(document, "run", "directory")
    if directory is None:
        return None
    checkpoints = _text(document, "checkpoint", "directory")
    data = [_text(document, "data", "train"), _text(document, "data", "held_out")]
    return TrainCommand(
        run_directory=Path(directory),
        checkpoints=Path(checkpoints) if checkpoints else Path(directory, "checkpoints"),
        paths=(found.recipe, *(Path(path) for path in data if path)),
        document=document,
    )


def read_elastic(
    text: str,
    *,
    num_ranks: int | None,
    recipe: TrainCommand | None,
    wait_s: float,
    hostfile: Path | None,
    in_slurm: bool,
) -> Elastic:
    """Returns what the options of an elastic run say. Raises UsageError if they, or the recipe, cannot be used.

    text: value of `--elastic`. num_ranks: value of `-n`. recipe: None for a command other than `hpctrain train`.
    """
    from hpctrain.supervise import Elastic, ElasticRange, elastic_batch, ranks_of_one_model

    range_ = ElasticRange.parse(text)
    if num_ranks is not None and num_ranks != range_.most:
        raise UsageError(f"-n {num_ranks} and --elastic {range_} name two numbers of ranks: leave out -n")
    if hostfile is not None and in_slurm:
        raise UsageError("--hostfile is for runs outside of Slurm: in a job, its nodes that are alive count")
    document = {} if recipe is None else recipe.document
    unit = ranks_of_one_model(document)
    if range_.least % unit or range_.most % unit:
        raise UsageError(
            f"--elastic {range_}: the recipe splits the model over {unit} ranks (parallel.tensor x parallel.pipeline), "
            f"so both numbers must be multiples of {unit}"
        )
    return Elastic(
        range=range_, wait_s=wait_s, unit=unit, batch=elastic_batch(document, range_=range_),
        hostfile=None if hostfile is None else hostfile.absolute(),
    )  # fmt: skip


def _text(document: Mapping[str, Any], section: str, key: str) -> str | None:
    table = document.get(section)
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else None


def _ranks_per_node(environ: Mapping[str, str], *, num_ranks: int, num_nodes: int) -> int:
    asked = environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else -(-num_ranks // num_nodes)
