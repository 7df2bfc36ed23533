"""Measures one cell: first each variant once (screening), then the variants that the figures need, in rounds."""

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
    """Sizes of the measurements.

    rounds: number of rounds after the screening; at least 5 for a reliable figure. share, screening_share: part of a
    cell's steps in one turn. screening_s, turn_s: time after which a turn ends with fewer steps. start_s: time limit
    for the first steps. stuck_s: a run that makes no step for this time has failed. restart_every: number of rounds
    after which all runs on one node are started again; 0: never. Starts of the same run differ: one is 10 to 20 %
    faster than another for as long as it runs.
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
    """The measurements of a cell at one link rate.

    screening: variant -> samples/s of its screening turn. rounds: for each round, variant -> samples/s, in the order of
    the turns. By variant: `failed`, its error; `runs`, the backend, algorithm and wire that it recorded; `started`, the
    command line that started its ranks; `variables`, the recorded environment variables that affect a run.
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
    """Yields a working directory as a user has it: with `examples/` and `data/`, on a filesystem that all nodes share.
    It is removed at the end."""
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="bench-step-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        (directory / "examples").symlink_to(REPOSITORY / "examples")
        (directory / "runs").mkdir()
        yield directory


def pack(recipe: str, *, directory: Path) -> None:
    """Packs the recipe's dataset, as the comment at the recipe's top says."""
    if not (directory / PACKING[recipe][1]).exists():
        subprocess.run(
            ["hpctrain", "data", "pack", *PACKING[recipe]], cwd=directory, env=user_environment(), check=True,
            stdout=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip


# Numbers for run directories, unique over all cells: a run would resume in a directory that an earlier cell used.
_RUN_NUMBERS = itertools.count(1)


class Turns:
    """The started runs of a cell. A context manager, which ends them all."""

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
        """Runs one turn and returns its samples/s; None if it failed."""
        steps = max(2, round(self._cell.steps * share))
        return self._guarded(
            name, lambda: self._runs[name].turn(steps=steps, settle=self.settle, at_most_s=at_most_s)
        )

    @property
    def settle(self) -> int:
        """Number of steps after a start or a pause that are not timed."""
        return max(2, round(self._cell.steps * self._scale.share / 20))

    def end(self, names: Sequence[str]) -> None:
        runs = [self._runs.pop(name) for name in names]
        for run in runs:
            run.kill_ranks()  # all ranks first: a launcher takes a moment to end
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
    """Measures a cell and returns what was found at each of its link rates. variants: None for all of them.

    A stopped rank still occupies some 300 MB, so only the runs that take part in the rounds exist at the same time.
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
    """Starts a variant, runs one turn at each link rate, and ends it."""
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
    """Runs one turn of every started run. Returns samples/s of those that did not fail."""
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
    """Returns backend, algorithm and wire from a run's record, such as `horovod, flat, fp16`."""
    return ", ".join(
        str(environment[name]) for name in ("backend", "algorithm", "wire") if name in environment
    )


def _variables(environment: dict[str, Any]) -> dict[str, str]:
    """Returns the recorded variables that affect a run, without Slurm's, which only identify the job."""
    variables = environment.get("variables", {})
    return {name: plain(value) for name, value in variables.items() if not name.startswith("SLURM_")}


def plain(text: str) -> str:
    """Returns the text without this machine's paths."""
    # The environment's folder may be a symbolic link; commands that look up their own path print the resolved one.
    for folder in (Path(sys.executable).parent, Path(sys.prefix).resolve() / "bin", REPOSITORY):
        text = text.replace(f"{folder}/", "")
    return text
