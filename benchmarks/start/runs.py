"""Runs of one epoch of digits, and of ranks that only start, in the ways in which ranks are started: seconds, processor
seconds, memory, results."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import psutil

from benchmarks.places import RanksFailed, at_head_node, run_checked, salloc
from benchmarks.start.ranks import INIT, LEFT
from benchmarks.start.task import FOLDER_VARIABLE, GO, STEPS_VARIABLE
from benchmarks.starting import (
    LAUNCH,
    REPOSITORY,
    Ended,
    Start,
    start_of,
    user_environment,
)
from benchmarks.turns import Training
from hpctrain.telemetry import read_records
from tests.cluster import Cluster

# Each rank by itself; forked, from a server that starts with them; forked, from a server that is there already.
WITHOUT, NOTHING, UP = "without", "nothing", "up"
NAMES = {
    WITHOUT: "without a fork server",
    NOTHING: "with one, from nothing",
    UP: "with one that is up already",
}
# How long a server waits for the launch that finds it up.
_LINGERS_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The command lines of one round. key: of its fork server."""

    key: str = field(default_factory=lambda: f"bench-{secrets.token_hex(4)}")

    def argv(self, kind: str, command: Sequence[str], *, num_ranks: int) -> list[str]:
        """Returns the command line of a launch. NOTHING leaves a fork server, which UP uses and ends."""
        if kind == WITHOUT:
            return alone(WITHOUT, command, num_ranks=num_ranks)
        lingers_s = _LINGERS_S if kind == NOTHING else 0.0
        shared = [sys.executable, "-m", "benchmarks.start.launch", self.key, str(lingers_s)]
        return [*shared, "-n", str(num_ranks), "--", *command]

    def server(self) -> int | None:
        """Returns the process id of the fork server on this machine; None if there is none."""
        for lock in Path(f"/dev/shm/hpctrain-fork-{os.geteuid()}").glob(f"{self.key}-*.lock"):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                server = psutil.Process(int(lock.read_text()))
                if is_server(server.cmdline()):
                    return server.pid
        return None


def is_server(command: Sequence[str]) -> bool:
    """Returns True if a command line is a fork server's, and not one that contains it, as the launcher's does."""
    starts_python = bool(command) and PurePath(command[0]).name.startswith("python")
    return starts_python and any(word.endswith("/fork_server/__main__.py") for word in command)


def alone(kind: str, command: Sequence[str], *, num_ranks: int, words: Sequence[str] = ()) -> list[str]:
    """Returns the command line of a user's launch, whose fork server ends with its ranks.

    kind: WITHOUT or NOTHING. words: further options of the launch.
    """
    forked = "--fork-server" if kind == NOTHING else "--no-fork-server"
    return [*LAUNCH, "-n", str(num_ranks), *words, forked, "--", *command]


# ---------------------------------------------------------------------- runs

TIMEOUT_S = 900.0
_LAST_LINES = 15
_SERVER_ENDS_IN_S = 30.0
# Of a rank that a fork server refuses, in its output.
STARTS_BY_ITSELF = "this rank starts by itself"
_LAST_LINE = re.compile(r"finished at step \d+, .* loss (\S+), accuracy (\S+); records in")
# Fields of a run's records that are no results.
_TIMES = ("time", "seconds")
_RESULTS = ("step", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Result of training one epoch.

    seconds: duration of the command. last_line: loss and accuracy as printed. results: by rank, the records of its
    steps and evaluations, without times.
    """

    seconds: float
    last_line: tuple[str, str]
    results: Sequence[Sequence[Mapping[str, Any]]]

    def equals(self, other: Epoch) -> bool:
        return self.last_line == other.last_line and self.results == other.results


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result of the rounds with one number of ranks.

    seconds: by kind, the duration of each round. differing: the kinds and rounds, in words, whose results are not those
    of the first run without a fork server. loss: the loss of that run. num_runs: number of runs that were compared.
    num_records: number of records of one run.
    """

    num_ranks: int
    seconds: Mapping[str, Sequence[float]]
    differing: Sequence[str]
    loss: str
    num_runs: int
    num_records: int


class Workplace:
    """The working directory of the runs. directory: an empty folder, where digits are packed once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count()
        run_command(
            [sys.executable, "-m", "hpctrain.cli.main", "data", "pack", "digits", str(directory / "digits")],
            what="data pack",
        )

    def training(self, *overrides: str) -> tuple[list[str], Path]:
        """Returns a command that trains digits into a new folder, and the folder."""
        folder = self.directory / f"run-{next(self._numbers):03d}"
        every = [
            f"run.directory={folder}", f"data.train={self.directory / 'digits' / 'train'}",
            f"data.held_out={self.directory / 'digits' / 'test'}", f"run.timeout_s={TIMEOUT_S:g}", *overrides,
        ]  # fmt: skip
        words = [word for override in every for word in ("--set", override)]
        return ["hpctrain", "train", str(REPOSITORY / "examples" / "digits.toml"), *words], folder

    def epoch(
        self,
        argv_of: Callable[[Sequence[str]], list[str]],
        *,
        num_ranks: int,
        what: str,
        environ: Mapping[str, str] | None = None,
    ) -> Epoch:
        """Trains one epoch.

        argv_of: returns the whole command line for the ranks' command. environ: variables; None for those of a user.
        Raises RanksFailed.
        """
        command, folder = self.training("run.epochs=1")
        began_s = time.perf_counter()
        done = run_command(argv_of(command), what=what, environ=environ)
        seconds = time.perf_counter() - began_s
        found = _LAST_LINE.search(done.stdout)
        if found is None:
            raise RanksFailed(f"{what}: no last line with a loss\n{done.tail}")
        results = [results_of(folder / "metrics" / f"rank-{rank:05d}.jsonl") for rank in range(num_ranks)]
        return Epoch(seconds=seconds, last_line=(found[1], found[2]), results=results)


def results_of(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a rank's steps and evaluations, without times."""
    return [
        {name: value for name, value in record.items() if name not in _TIMES}
        for record in read_records(path)
        if record["kind"] in _RESULTS
    ]


def epochs(place: Workplace, *, num_ranks: int, rounds: int, seed: int) -> Compared:
    """Figures 1 and 5. In each round a run without a fork server, and two with one, of which the first starts it; which
    comes first is drawn. Raises RanksFailed."""
    draw = random.Random(seed)
    found: list[tuple[int, str, Epoch]] = []
    for number in range(rounds):
        launches = Launches()
        for kind in draw.choice([(WITHOUT, NOTHING, UP), (NOTHING, UP, WITHOUT)]):
            what = f"{num_ranks} ranks, {NAMES[kind]}, round {number + 1}"

            def argv_of(command: Sequence[str], *, kind: str = kind, by: Launches = launches) -> list[str]:
                return by.argv(kind, command, num_ranks=num_ranks)

            found.append((number, kind, place.epoch(argv_of, num_ranks=num_ranks, what=what)))
            if kind != WITHOUT:
                _expect_server(launches, present=kind == NOTHING, what=what)
    return compared(found, num_ranks=num_ranks)


def epochs_on_nodes(
    place: Workplace, cluster: Cluster, *, ranks_per_node: int, rounds: int, seed: int
) -> Compared:
    """Figure 6: like `epochs`, in a job on all nodes of a cluster, where srun starts the ranks. The servers of a launch
    end with its ranks, so no run finds one. Raises RanksFailed."""
    draw = random.Random(seed)
    num_nodes = cluster.plan.num_nodes
    num_ranks = num_nodes * ranks_per_node
    environ = at_head_node(cluster, user_environment())
    words = ["--ranks-per-node", str(ranks_per_node)]
    found: list[tuple[int, str, Epoch]] = []
    for number in range(rounds):
        for kind in draw.sample((WITHOUT, NOTHING), 2):

            def argv_of(command: Sequence[str], *, kind: str = kind) -> list[str]:
                launch = alone(kind, command, num_ranks=num_ranks, words=words)
                return cluster.argv([*salloc(num_nodes), *launch], cwd=place.directory)

            what = f"{num_nodes} nodes x {ranks_per_node} ranks, {NAMES[kind]}, round {number + 1}"
            epoch = place.epoch(argv_of, num_ranks=num_ranks, what=what, environ=environ)
            found.append((number, kind, epoch))
    return compared(found, num_ranks=num_ranks)


def compared(found: Sequence[tuple[int, str, Epoch]], *, num_ranks: int) -> Compared:
    """Returns the comparison of the runs. found: for each run the number of its round, its kind, and the epoch."""
    first = next(epoch for _, kind, epoch in found if kind == WITHOUT)
    return Compared(
        num_ranks=num_ranks,
        seconds={
            kind: [epoch.seconds for _, name, epoch in found if name == kind]
            for kind in (WITHOUT, NOTHING, UP)
        },
        differing=[
            f"{NAMES[kind]}, round {number + 1}" for number, kind, epoch in found if not epoch.equals(first)
        ],
        loss=first.last_line[0],
        num_runs=len(found),
        num_records=sum(map(len, first.results)),
    )


def _expect_server(launches: Launches, *, present: bool, what: str) -> None:
    """Raises RanksFailed if a launch has left no server, or if one stays that nobody needs."""
    if present:
        time.sleep(0.5)  # one that waits for nobody ends sooner
    until_s = time.monotonic() + _SERVER_ENDS_IN_S
    while (launches.server() is not None) != present:
        if present or time.monotonic() > until_s:
            raise RanksFailed(
                f"{what}: " + ("the server has ended" if present else "the server has not ended")
            )
        time.sleep(0.05)


def processor_seconds(
    place: Workplace, *, sizes: Sequence[int], rounds: int, seed: int
) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Figure 2. Returns INIT or LEFT -> kind -> number of ranks -> processor seconds of each round, of all processes of
    a launch whose ranks start MPI and leave. In turns. Raises RanksFailed, also if a process has stayed."""
    draw = random.Random(seed)
    every = list(itertools.product((INIT, LEFT), (WITHOUT, NOTHING), sizes))
    found: dict[str, dict[str, dict[int, list[float]]]] = {
        end: {kind: {num_ranks: [] for num_ranks in sizes} for kind in (WITHOUT, NOTHING)}
        for end in (INIT, LEFT)
    }
    result = place.directory / "usage.json"
    for _ in range(rounds):
        for end, kind, num_ranks in draw.sample(every, len(every)):
            what = f"{num_ranks} ranks that start and leave, {NAMES[kind]}"
            argv = alone(kind, ranks_command(end), num_ranks=num_ranks)
            run_command([sys.executable, "-m", "benchmarks.start.usage", str(result), *argv], what=what)
            used = json.loads(result.read_text())
            if used["code"] != 0 or used["left"]:
                raise RanksFailed(f"{what}: exit code {used['code']}, processes that stayed: {used['left']}")
            found[end][kind][num_ranks].append(used["cpu_s"])
    return found


def starts(place: Workplace) -> list[Start]:
    """Returns how two ranks are started without a fork server, and with one. Raises RanksFailed."""
    found = []
    for kind in (WITHOUT, NOTHING):
        folder = place.directory / f"ranks-{kind}"
        folder.mkdir()
        argv = alone(kind, [*ranks_command(INIT), str(folder)], num_ranks=2)
        done = run_command(argv, what=f"2 ranks, {NAMES[kind]}")
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        found.append(start_of(argv, done, variables={}, ranks=ranks, directory=place.directory))
    return found


def ranks_command(end: str) -> list[str]:
    """Returns the command of ranks that start MPI and end. end: INIT or LEFT, see `benchmarks.start.ranks`."""
    return [sys.executable, "-m", "benchmarks.start.ranks", end]


def run_command(argv: Sequence[str], *, what: str, environ: Mapping[str, str] | None = None) -> Ended:
    """Runs a command to its end. environ: by default that of a user. Raises RanksFailed, also if a rank that was to be
    forked was not."""
    done = run_checked(argv, what=what, environ=environ or user_environment(), timeout_s=TIMEOUT_S)
    if STARTS_BY_ITSELF in done.stderr:
        raise RanksFailed(f"{what}: a rank was not forked\n{done.tail}")
    return done


# ---------------------------------------------------------------------- memory

RANKS, CLIENTS, SERVER = "ranks", "clients", "server"
_STEPS_PER_EPOCH = 22
_CLIENT = "_fork_client."  # in a command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of proportional set size by what the processes are. numbers: of processes."""

    pss: Mapping[str, int]
    numbers: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.pss.values())


def memory(place: Workplace, *, kind: str, num_ranks: int, steps: int) -> Memory:
    """Starts a training, and returns the memory when every rank has made `steps` steps. Raises RanksFailed."""
    command, folder = place.training(
        f"run.epochs={1 + steps // _STEPS_PER_EPOCH}", "task.target=benchmarks.start.task:Held"
    )
    notes = Path(f"{folder}.held")
    notes.mkdir()
    environ = {
        **user_environment(), "PYTHONPATH": str(REPOSITORY), FOLDER_VARIABLE: str(notes), STEPS_VARIABLE: str(steps),
    }  # fmt: skip
    what = f"{num_ranks} ranks, {NAMES[kind]}, held after {steps} steps"
    training = Training(what, mark=str(folder), log=Path(f"{folder}.log"))
    training.launch(alone(kind, command, num_ranks=num_ranks), environ=environ)
    try:
        training.wait_until(
            lambda: len(list(notes.iterdir())) >= num_ranks, within_s=TIMEOUT_S,
            what=lambda: "not all ranks came so far",
        )  # fmt: skip
        time.sleep(0.2)  # the last one waits by now
        found = _read_memory(training.pid, ranks={int(path.name) for path in notes.iterdir()})
        (notes / GO).touch()
        code, lines = training.exit_code(within_s=TIMEOUT_S), training.lines()
    finally:
        training.end()
    if code != 0 or any(STARTS_BY_ITSELF in line for line in lines):
        raise RanksFailed(f"{what}: exit code {code}\n{' | '.join(lines[-_LAST_LINES:])}")
    return found


def _read_memory(launcher: int, *, ranks: set[int]) -> Memory:
    """Returns the memory of the ranks, of their servers, and of the clients that a launcher has started."""
    pss: dict[str, int] = {}
    numbers: dict[str, int] = {}
    # Forked ranks, and the server that has forked them, are no descendants of the launcher.
    forked = [psutil.Process(rank) for rank in ranks]
    servers = [parent for rank in forked if (parent := rank.parent()) is not None]
    every = {*psutil.Process(launcher).children(recursive=True), *forked, *servers}
    for process in every:
        words = process.cmdline() or [""]
        if process.pid in ranks:
            role = RANKS
        elif _CLIENT in words[0]:
            role = CLIENTS
        elif is_server(words):
            role = SERVER
        else:  # mpirun
            continue
        pss[role] = pss.get(role, 0) + process.memory_full_info().pss
        numbers[role] = numbers.get(role, 0) + 1
    return Memory(pss=pss, numbers=numbers)
