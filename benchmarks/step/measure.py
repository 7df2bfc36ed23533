"""One cell: all its variants once, then those that the figures need, round after round."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.step.places import Place, user_environment
from benchmarks.step.turns import Run, RunFailed
from benchmarks.step.variants import Cell, Variant, candidates, companions, decided, default_of
from tests.ranks_launcher import REPOSITORY

Say = Callable[[str], None]

PACKING = {
    "digits": ["digits", "data/digits"],
    "characters": ["python-source", "data/python-source", "--window", "128"],
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    rounds: of the second part, at least 5 where a figure is to be trusted. share: of a cell's steps that a turn has.
    screening_s, turn_s: a turn ends then, with fewer steps. start_s: until a run makes steps. stuck_s: a run that makes
    no step for so long has failed. restart_every: on this machine all runs are started again after this many rounds,
    since no two starts of the same run are equally fast: one is 10 to 20 % faster than the next, for as long as it
    lives. 0: never.
    """

    rounds: int = 12
    share: float = 1.0
    screening_share: float = 1.0
    screening_s: float = 2.5
    turn_s: float = 3.0
    start_s: float = 90.0
    stuck_s: float = 60.0
    restart_every: int = 2


FULL = Scale()
QUICK = Scale(rounds=1, share=0.1, screening_share=0.1, start_s=200.0, restart_every=0)


@dataclass(kw_only=True)
class Found:
    """What was measured in a cell at one rate of its links.

    screening: samples/s of each variant's one turn. rounds: of each round, samples/s by variant, in the order in which
    they had their turns. Of each variant: failed, what happened to it; runs, the backend, algorithm and wire that it
    recorded; started, the command line that started its ranks; variables, those of its record that shape a run.
    """

    rate: str | None
    screening: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    started: dict[str, str] = field(default_factory=dict)
    variables: dict[str, dict[str, str]] = field(default_factory=dict)


@contextmanager
def working_directory() -> Iterator[Path]:
    """Where a user would be: with `examples/` and `data/`, on a filesystem that all nodes see. Goes at the end."""
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="bench-step-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        (directory / "examples").symlink_to(REPOSITORY / "examples")
        (directory / "runs").mkdir()
        yield directory


def pack(recipe: str, *, directory: Path) -> None:
    """Make the recipe's data, as its first lines say."""
    if not (directory / PACKING[recipe][1]).exists():
        subprocess.run(
            ["hpctrain", "data", "pack", *PACKING[recipe]], cwd=directory, env=user_environment(), check=True,
            stdout=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip


# Of all cells: a run directory that an earlier cell has used would be resumed, with that cell's data and records.
_RUN_NUMBERS = itertools.count(1)


class Turns:
    """The runs of a cell that are up. As a context manager it ends them all."""

    def __init__(
        self, cell: Cell, *, place: Place, directory: Path, scale: Scale, failed: dict[str, str]
    ) -> None:
        self.failed = failed
        self._cell = cell
        self._place = place
        self._directory = directory
        self._scale = scale
        self._runs: dict[str, Run] = {}

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end(list(self._runs))

    @property
    def up(self) -> dict[str, Run]:
        return self._runs

    def start(self, variant: Variant) -> None:
        run = Run(
            variant, recipe=self._cell.recipe, place=self._place, directory=self._directory,
            number=next(_RUN_NUMBERS), start_s=self._scale.start_s, turn_s=self._scale.stuck_s,
        )  # fmt: skip
        self._runs[variant.name] = run
        self._guarded(variant.name, lambda: run.start(warmup_steps=self.settle))

    def turn(self, name: str, *, share: float, at_most_s: float) -> float | None:
        """samples/s of one turn; None where it failed."""
        steps = max(2, round(self._cell.steps * share))
        return self._guarded(
            name, lambda: self._runs[name].turn(steps=steps, settle=self.settle, at_most_s=at_most_s)
        )

    @property
    def settle(self) -> int:
        """Steps after a start, or after a pause, that do not count."""
        return max(2, round(self._cell.steps * self._scale.share / 20))

    def end(self, names: Sequence[str]) -> None:
        runs = [self._runs.pop(name) for name in names]
        for run in runs:
            run.kill_ranks()  # all at once: a launcher takes a moment to end
        for run in runs:
            run.end()

    def _guarded(self, name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RunFailed as error:
            self.failed[name] = plain(str(error))
            self.end([name])
            return None


def measure(
    cell: Cell,
    *,
    place: Place,
    directory: Path,
    scale: Scale,
    seed: int,
    say: Say,
    variants: Sequence[Variant] | None = None,
) -> list[Found]:
    """What was found at each rate of the cell. variants: instead of all of them.

    A rank takes some 300 MB also while it is stopped, so only the runs that take part in the rounds are up together.
    """
    pack(cell.recipe, directory=directory)
    order = random.Random(seed)
    everyone = list(variants or [default_of(cell), *candidates(cell), *companions(cell)])
    failed: dict[str, str] = {}
    made = [Found(rate=rate, failed=failed) for rate in cell.rates]
    with Turns(cell, place=place, directory=directory, scale=scale, failed=failed) as turns:
        for variant in order.sample(everyone, len(everyone)):
            _screen(variant, made, turns=turns, place=place, scale=scale)
        say(f"{cell.name}: {len(everyone)} variants have had one turn")
        for found in made:
            _set_rate(place, found.rate)
            names = decided(cell, found.screening)
            chosen = [variant for variant in everyone if variant.name in names]
            kept = {variant.name for variant in chosen if not variant.calibrates}
            turns.end([name for name in turns.up if name not in kept])
            for number in range(scale.rounds):
                if scale.restart_every and not cell.on_cluster and number % scale.restart_every == 0:
                    turns.end(list(turns.up))
                for variant in chosen:
                    if variant.name not in turns.up and variant.name not in failed:
                        turns.start(variant)
                found.rounds.append(_round(turns, order=order, scale=scale))
            at = f" at {found.rate}" if found.rate is not None else ""
            say(f"{cell.name}{at}: {scale.rounds} rounds of {', '.join(names)}")
    return made


def _screen(variant: Variant, made: Sequence[Found], *, turns: Turns, place: Place, scale: Scale) -> None:
    """Start a variant, give it one turn at each rate, and end it."""
    for found in made:
        _set_rate(place, found.rate)
        if variant.calibrates and variant.name in turns.up:
            turns.end([variant.name])
        if variant.name not in turns.up and variant.name not in turns.failed:
            turns.start(variant)
        run = turns.up.get(variant.name)
        if run is None:
            return
        environment = run.environment()
        found.runs[variant.name] = _described(environment)
        found.started[variant.name] = plain(run.start_line())
        found.variables[variant.name] = _variables(environment)
        rate = turns.turn(variant.name, share=scale.screening_share, at_most_s=scale.screening_s)
        if rate is not None:
            found.screening[variant.name] = rate
    if variant.name in turns.up:
        turns.end([variant.name])


def _round(turns: Turns, *, order: random.Random, scale: Scale) -> dict[str, float]:
    """One turn of every run that is up; samples/s of those that did not fail."""
    names = list(turns.up)
    rates = {
        name: turns.turn(name, share=scale.share, at_most_s=scale.turn_s)
        for name in order.sample(names, len(names))
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def _set_rate(place: Place, rate: str | None) -> None:
    if rate is not None:
        place.set_rate(rate)


def _described(environment: dict[str, Any]) -> str:
    """`horovod, flat, fp16` of a run's own record."""
    return ", ".join(
        str(environment[name]) for name in ("backend", "algorithm", "wire") if name in environment
    )


def _variables(environment: dict[str, Any]) -> dict[str, str]:
    """Slurm's own left out: they only number the job."""
    variables = environment.get("variables", {})
    return {name: plain(value) for name, value in variables.items() if not name.startswith("SLURM_")}


def plain(text: str) -> str:
    """Without this machine's folders."""
    # The environment may be a link to another folder, which commands that look for themselves resolve.
    for folder in (Path(sys.executable).parent, Path(sys.prefix).resolve() / "bin", REPOSITORY):
        text = text.replace(f"{folder}/", "")
    return text
