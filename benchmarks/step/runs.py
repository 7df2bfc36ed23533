"""Runs of a cell's variants, which take turns: first each once (screening), then those of the figures, in rounds.

All runs are started one after another, as a user starts them, without settings that `hpctrain launch` would not make,
and stopped after their warm-up steps; for a turn one of them continues for a number of steps.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import starting
from benchmarks.harness import Say
from benchmarks.places import RanksFailed, at_head_node, salloc
from benchmarks.starting import REPOSITORY
from benchmarks.step.variants import (
    RANKS_PER_NODE,
    Cell,
    Variant,
    candidates,
    companions,
    decided,
    default_of,
)
from benchmarks.turns import Training, mpirun
from tests.cluster import Cluster
from tests.cluster.requirements import search_path

# Variables that the tests set for their ranks, or that a shell may have set for all programs.
NOT_A_USERS = ("LD_PRELOAD", "OMP_NUM_THREADS")


def user_environment() -> dict[str, str]:
    """Returns the environment of a user's shell, with this tree's hpctrain."""
    environ = {name: value for name, value in starting.user_environment().items() if name not in NOT_A_USERS}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), search_path()])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environ.get("PYTHONPATH")]))
    if os.geteuid() == 0:  # as `hpctrain launch` does
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return environ


def launch_words(variant: Variant, command: Sequence[str], *, ranks_per_node: int | None = None) -> list[str]:
    """Returns the command line that a user types."""
    if variant.by_mpirun:
        return [*mpirun(variant.num_ranks), *command]
    placed = ["--ranks-per-node", str(ranks_per_node)] if ranks_per_node is not None else []
    return ["hpctrain", "launch", "-n", str(variant.num_ranks), *placed, "--", *command]


class OneNode:
    """Starts ranks on this machine."""

    def command(
        self, variant: Variant, command: Sequence[str], *, directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Returns what starts a variant's ranks in `directory`: command line and environment."""
        return launch_words(variant, command), {**user_environment(), **dict(variant.environment)}

    def set_rate(self, rate: str | None) -> None:
        """Limits the rate of the links between nodes; None: no limit."""
        assert rate is None


class OnCluster(OneNode):
    """Starts them on the cluster of namespaces: two on each node, which has one core for Slurm."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def command(
        self, variant: Variant, command: Sequence[str], *, directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        job = salloc(variant.num_ranks // RANKS_PER_NODE)
        words = [*job, *launch_words(variant, command, ranks_per_node=RANKS_PER_NODE)]
        argv = self._cluster.argv(words, cwd=directory, env=dict(variant.environment))
        return argv, at_head_node(self._cluster, user_environment())

    def set_rate(self, rate: str | None) -> None:
        self._cluster.set_rate(rate)


class StepRecords:
    """The step records of one rank, read while the run writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps: dict[int, Mapping[str, Any]] = {}

    def read(self) -> int:
        """Reads new records. Returns the newest step, 0 before the first."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return 0
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                self.steps[record["step"]] = record
        return max(self.steps, default=0)


def samples_per_s(ranks: Sequence[StepRecords], *, first: int, last: int) -> float:
    """Returns samples/s of the steps `first` to `last`: samples of all ranks / time of the slowest rank."""
    steps = range(first, last + 1)
    samples = sum(rank.steps[step]["samples"] for rank in ranks for step in steps)
    return samples / max(sum(rank.steps[step]["seconds"]["step"] for step in steps) for rank in ranks)


def samples_per_s_apart(
    ranks: Sequence[StepRecords], *, firsts: Sequence[int], lasts: Sequence[int]
) -> float:
    """Returns samples/s of ranks that do not wait for each other: the sum of each rank's samples / its own time."""
    total = 0.0
    for rank, first, last in zip(ranks, firsts, lasts, strict=True):
        steps = [rank.steps[step] for step in range(first, last + 1)]
        total += sum(s["samples"] for s in steps) / sum(s["seconds"]["step"] for s in steps)
    return total


class Run:
    """One training run. start_s: time limit for the first steps. turn_s: time limit for a turn."""

    def __init__(
        self, variant: Variant, *, recipe: str, place: OneNode, directory: Path, number: int, start_s: float,
        turn_s: float,
    ) -> None:  # fmt: skip
        self.variant = variant
        self._recipe, self._place, self._directory = recipe, place, directory
        self._name = f"runs/run-{number:03}"
        self._start_s, self._turn_s = start_s, turn_s
        self._training = Training(
            variant.name, mark=self._name, log=directory / f"run-{number:03}.log", cwd=directory, poll_s=0.05
        )
        metrics = directory / self._name / "metrics"
        self._ranks = [StepRecords(metrics / f"rank-{rank:05}.jsonl") for rank in range(variant.num_ranks)]

    @property
    def command(self) -> list[str]:
        """Command line of each rank."""
        recipe = RECIPES[self._recipe]
        if self.variant.loop:
            best = ["--best"] if self.variant.best else []
            words = [recipe, self._name, self.variant.loop, *best]
            return [sys.executable, "-m", "benchmarks.step.peer_loop", *words]
        length = "run.steps=1000000" if self._recipe == "characters" else "run.epochs=1000000"
        # A turn is controlled by the step records, so each must be written at once.
        fixed = [length, f"run.directory={self._name}", "telemetry.write_every_s=0"]
        words = [word for override in (*fixed, *self.variant.overrides) for word in ("--set", override)]
        return ["hpctrain", "train", recipe, *words]

    def start(self, *, warmup_steps: int) -> None:
        """Starts the ranks, and stops them after `warmup_steps` steps. Raises RanksFailed."""
        argv, environ = self._place.command(self.variant, self.command, directory=self._directory)
        self._training.launch(argv, environ=environ)
        self._wait_for(warmup_steps, within_s=self._start_s)
        self._training.stop()

    def turn(self, *, steps: int, settle: int, at_most_s: float) -> float:
        """Continues the ranks for `settle` steps that are not timed and `steps` that are; returns their samples/s.

        at_most_s: time after which the turn ends with fewer steps, at least one. Raises RanksFailed.
        """
        firsts = [rank.read() + settle + 1 for rank in self._ranks]
        first = max(firsts)
        last = first - 1 + steps
        ends_s = time.monotonic() + at_most_s
        self._training.resume()
        try:
            self._wait_for(first, within_s=self._turn_s)
            self._training.wait_until(
                lambda: self._read() >= last or time.monotonic() > ends_s,
                within_s=self._turn_s,
                what=lambda: "stuck",
            )
        finally:
            self._training.stop()
        if self.variant.loop == "alone":
            return samples_per_s_apart(
                self._ranks, firsts=firsts, lasts=[rank.read() for rank in self._ranks]
            )
        return samples_per_s(self._ranks, first=first, last=min(self._read(), last))

    def environment(self) -> dict[str, Any]:
        """Returns the content of the run's environment.json; {} for a peer."""
        path = self._directory / self._name / "environment.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def start_line(self) -> str:
        """Returns the command line that started the ranks: as `hpctrain launch` printed it, or the user's mpirun."""
        if self.variant.by_mpirun:
            set_by_user = [f"{name}={value}" for name, value in self.variant.environment]
            return " ".join([*set_by_user, *launch_words(self.variant, self.command)])
        lines = [line for line in self._training.lines() if line.startswith("hpctrain launch: ")]
        return next((line for line in lines if self._name in line), "").removeprefix("hpctrain launch: ")

    def kill_ranks(self) -> None:
        self._training.kill_ranks()

    def end(self) -> None:
        """Ends all processes of the run."""
        self._training.kill_ranks()
        self._training.end()

    def _wait_for(self, step: int, *, within_s: float) -> None:
        self._training.wait_until(
            lambda: self._read() >= step, within_s=within_s,
            what=lambda: f"made {self._read()} steps and did not reach step {step}",
        )  # fmt: skip

    def _read(self) -> int:
        """Returns the newest step that all ranks have recorded."""
        return min(rank.read() for rank in self._ranks)


# ---------------------------------------------------------------------- cells

RECIPES = {
    "digits": "examples/digits.toml",
    "characters": "examples/characters.toml",
    "convolutions": str(REPOSITORY / "benchmarks/step/convolutions.toml"),
}
PACKING = {
    "convolutions": ["digits", "data/digits"],
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
        self, cell: Cell, *, place: OneNode, directory: Path, scale: Scale, failed: dict[str, str]
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
        except RanksFailed as error:
            self.failed[name] = plain(str(error))
            self.end([name])
            return None


def measure(
    cell: Cell, *, place: OneNode, directory: Path, scale: Scale, seed: int, say: Say,
    variants: Sequence[Variant] | None = None,
) -> list[Found]:  # fmt: skip
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


def _screen(variant: Variant, made: Sequence[Found], *, turns: Turns, place: OneNode, scale: Scale) -> None:
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


def _set_rate(place: OneNode, rate: str | None) -> None:
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
