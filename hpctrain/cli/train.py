"""`hpctrain train RECIPE.toml`."""

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
            help="auto: go on from the newest good checkpoint, if there is one. never: start anew (what an earlier "
            "run left is moved aside). PATH: go on from this checkpoint.",
        ),
    ] = "auto",
) -> None:
    """Train, as this rank of whatever launched it; alone it is one rank.

    \b
    hpctrain train examples/digits.toml
    hpctrain train examples/digits.toml --set run.epochs=3 --set optimizer.lr=0.01
    mpirun -n 4 hpctrain train examples/digits.toml --resume never
    hpctrain launch -n 4 --ranks-per-node 2 -- hpctrain train examples/digits.toml
    """
    from hpctrain.resilience import SaveSignal, StopRequest

    # Before torch is loaded, and not given back before the process ends: a signal in the first or the last
    # seconds must not kill a rank.
    stop = StopRequest().install()
    save_signal = SaveSignal().install()

    from hpctrain.run.recipe.load import load_recipe
    from hpctrain.run.training import Resume, train

    train(
        load_recipe(recipe, overrides=overrides or []),
        recipe_path=recipe,
        resume=Resume.parse(resume),
        stop=stop,
        save_signal=save_signal,
    )
