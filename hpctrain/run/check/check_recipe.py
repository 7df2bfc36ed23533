"""The check of a recipe, on the ranks that were started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.errors import HpctrainError, RecipeError
from hpctrain.run.check.recipe_subject import RecipeSubject
from hpctrain.run.compute.postponed_dynamo import set_deterministic
from hpctrain.run.experiments.causes.decide import decide
from hpctrain.run.experiments.causes.report import CheckReport
from hpctrain.run.experiments.observe import Experiments
from hpctrain.run.experiments.scratch import scratch_folder
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session, init

# A rank that fails alone leaves the others waiting; a check's operations are short.
_TIMEOUT_S = 120.0


def check_recipe(recipe: Recipe, *, recipe_path: Path, steps: int, scratch: Path) -> CheckReport:
    """Checks a recipe on the ranks that the launcher started. Collective. Nothing is written to the run's directory.

    scratch: a folder that all nodes share, for a few checkpoints, which are removed. Raises RecipeError for fewer than
    two ranks, LaunchError if no folder can be made there, CheckpointError if the checkpoints cannot be written, and the
    errors of a run that cannot start.
    """
    with init(
        backend=recipe.run.backend, device=recipe.run.device, threads_per_rank=recipe.run.threads_per_rank,
        timeout_s=min(recipe.run.timeout_s, _TIMEOUT_S),
    ) as session:  # fmt: skip
        try:
            return check_with(session, recipe, recipe_path=recipe_path, steps=steps, scratch=scratch)
        except HpctrainError as error:
            if not error.agreed:
                raise
            failed = error  # which all ranks have: the session ends as usual
    raise failed


def check_with(
    session: Session, recipe: Recipe, *, recipe_path: Path, steps: int, scratch: Path, quiet: bool = False
) -> CheckReport:
    """As `check_recipe`, with the ranks of an open session. quiet: no lines of progress. Collective."""
    search = [Path.cwd(), recipe_path.absolute().parent]
    if session.world_size < 2:
        raise RecipeError("a check compares ranks: start it with -n 2 or more", agreed=True)
    if recipe.run.deterministic:
        set_deterministic()
    say = progress(1 if quiet else session.rank)
    with scratch_folder(scratch, comm=session.world) as folder:
        subject = session.agreed(
            lambda: RecipeSubject(recipe, search=search, scratch=folder), os_error=RecipeError
        )
        session.agreed(subject.variables, os_error=RecipeError)  # imports the user's modules
        observations = Experiments(subject, session, steps=steps, say=say).observe()
    return CheckReport(name=subject.name, observations=observations, findings=decide(observations))


def progress(rank: int) -> Callable[[str], None]:
    """Returns what shows a line of progress: on rank 0, on stderr."""

    def say(text: str) -> None:
        if rank == 0:
            print(f"checking: {text}", file=sys.stderr, flush=True)

    return say
