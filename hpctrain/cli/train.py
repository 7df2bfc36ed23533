"""The command `hpctrain train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."
        ),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: resume from the newest good checkpoint, if there is one. never: start from scratch (files of "
            "an earlier run are moved aside). PATH: resume from this checkpoint.",
        ),
    ] = "auto",
) -> None:
    """Train as RECIPE says. Each process that mpirun, srun or hpctrain launch started is one rank.

    \b
    hpctrain train examples/digits.toml
    hpctrain train examples/digits.toml --set run.epochs=3 --set optimizer.lr=0.01
    mpirun -n 4 hpctrain train examples/digits.toml --resume never
    hpctrain launch -n 4 --ranks-per-node 2 -- hpctrain train examples/digits.toml
    """
    import gc

    from hpctrain.resilience import CheckpointSignal, StopRequest, ignore_signals, release_signals
    from hpctrain.run import Resume, load_recipe, train

    # The modules imported so far stay as long as the process: no later collection traverses their objects.
    gc.freeze()
    gc.enable()
    # `main` holds the signals back until they are handled here.
    try:
        found = load_recipe(recipe, overrides=overrides or [])
        stop, handled = StopRequest(found.stop.signals).install(), [*found.stop.signals]
        save_signal = None
        if found.checkpoint.signal != "none":
            save_signal = CheckpointSignal(found.checkpoint.signal).install()
            handled.append(found.checkpoint.signal)
    finally:
        release_signals()
    try:
        train(found, recipe_path=recipe, resume=Resume.parse(resume), stop=stop, save_signal=save_signal)
    finally:
        ignore_signals(handled)  # a late signal must not kill a rank
