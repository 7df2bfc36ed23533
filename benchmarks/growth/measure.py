"""Measures runs with one number of ranks: training, saving, stopping, resuming, a hang; and their operations on shared
files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.growth.task import FIRST, STEADY
from benchmarks.places import RanksFailed
from benchmarks.starting import LAUNCH, REPOSITORY, user_environment
from benchmarks.turns import Training
from hpctrain.telemetry import read_records

RANKS_PER_NODE = 4
SHARD_MB = "0.0015"
SAMPLES_PER_RANK = 15  # per step: enough that every rank has opened every shard before the steady steps
BEGIN, END, STOP = 65, 105, 108  # steps without a save between the first two
# limits.step_s. Not run.timeout_s: of ranks that share a core the last one starts a minute after the first.
TIMEOUT_S = 60.0
TIME_LIMIT_S = 900.0  # for everything that is waited for
STOPPED = 75  # exit code of a run that saved its state and ended early

Counts = Counter[tuple[int, str, str]]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The measurements with one number of ranks.

    whole: number of operations from the start to the end of the resumed run, by (rank, area, operation). steady: the
    same of `END - BEGIN` steps. start_s: seconds from the command to the slowest rank's first step. received, calls:
    bytes and calls of MPI until the first step, of the rank that received most. resident: bytes of memory without pages
    of files, median of the ranks. bare: the same of ranks that only use MPI (`bare_ranks`). hang: see `hang`.
    """

    num_ranks: int
    whole: Mapping[tuple[int, str, str], int]
    steady: Mapping[tuple[int, str, str], int]
    start_s: float
    received: int
    calls: int
    resident: float
    bare: float
    hang: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // RANKS_PER_NODE)


class Filesystem:
    """The counting filesystem, mounted at `place`; `storage` is the folder below it."""

    def __init__(self, directory: Path) -> None:
        self.storage, self.place = directory / "storage", directory / "shared"
        self.storage.mkdir()
        self.place.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.growth.counting_filesystem", str(self.storage),
             str(self.place)],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self._expect("ready\n")

    def counts(self) -> Counts:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("counts\n")
        found = json.loads(self._process.stdout.readline())
        return Counter({(rank, area, name): count for rank, area, name, count in found})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        subprocess.run(["umount", "-l", str(self.place)], capture_output=True, check=False)

    def _expect(self, line: str) -> None:
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        if found != line:
            raise RanksFailed(f"the counting filesystem did not start: {found!r}")


def build_counter(directory: Path) -> Path:
    """Compiles the library that counts messages; returns its path."""
    library = directory / "messages.so"
    source = Path(__file__).with_name("messages.c")
    subprocess.run(["mpicc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    return library


def measure(num_ranks: int, *, backend: str, directory: Path, library: Path, hangs: bool) -> Seen:
    """Runs training with `num_ranks` ranks of emulated nodes. directory: an empty folder."""
    filesystem = Filesystem(directory)
    try:
        subprocess.run(
            [sys.executable, "-m", "hpctrain.cli.main", "data", "pack", "digits", str(filesystem.storage / "data"),
             "--shard-mb", SHARD_MB],
            cwd=REPOSITORY, env=user_environment(), check=True, capture_output=True,
        )  # fmt: skip
        runs = _Runs(filesystem, num_ranks=num_ranks, backend=backend, directory=directory, library=library)
        return runs.measure(hangs=hangs)
    finally:
        filesystem.close()


class _Runs:
    def __init__(
        self, filesystem: Filesystem, *, num_ranks: int, backend: str, directory: Path, library: Path
    ) -> None:
        self._filesystem = filesystem
        self._num_ranks = num_ranks
        self._backend = backend
        self._directory = directory
        self._library = library
        self._began = 0.0  # when the newest launcher was started, in seconds since 1970

    def measure(self, *, hangs: bool) -> Seen:
        before = self._filesystem.counts()
        with self._started("first") as first:
            began = self._began
            self._wait_for(BEGIN, first)
            begun = self._filesystem.counts()
            self._wait_for(END, first)
            steady = self._filesystem.counts() - begun
            self._wait_for(STOP, first)
            os.kill(first.pid, signal.SIGINT)
            self._expect(STOPPED, first)
        with self._started("second", f"run.steps={STOP + 40}") as second:
            self._expect(0, second)
        whole = self._filesystem.counts() - before
        notes = self._lines("first", "notes")
        messages = [row for rows in self._lines("first", "messages") for row in rows if int(row[0]) == FIRST]
        return Seen(
            num_ranks=self._num_ranks, whole=whole, steady=steady,
            start_s=max(float(row[1]) for rows in notes for row in rows if int(row[0]) == FIRST) - began,
            received=max(int(row[2]) for row in messages), calls=max(int(row[1]) for row in messages),
            resident=median(float(row[2]) for rows in notes for row in rows if int(row[0]) == STEADY),
            bare=self.bare(), hang=self.hang() if hangs else {},
        )  # fmt: skip

    def bare(self) -> float:
        """Returns the memory of ranks that only use MPI, in bytes; median of the ranks."""
        folder = self._directory / "bare"
        folder.mkdir()
        argv = [*self._launch(), sys.executable, "-m", "benchmarks.growth.bare_ranks", str(folder)]
        subprocess.run(
            argv, cwd=REPOSITORY, env=user_environment(), check=True, capture_output=True, timeout=TIME_LIMIT_S,
        )  # fmt: skip
        return median(int(path.read_text()) for path in folder.iterdir())

    def _launch(self) -> list[str]:
        ranks_per_node = str(min(self._num_ranks, RANKS_PER_NODE))
        return [*LAUNCH, "-n", str(self._num_ranks), "--ranks-per-node", ranks_per_node, "--"]

    def hang(self) -> dict[str, Any]:
        """Stops one rank in the middle of a run. Returns the exit code, the seconds until it is named, until all ranks
        have gone and until the launcher has, how many lines the ranks printed, and those that name the stopped rank."""
        silent = self._num_ranks // 2
        with self._started("hang", "run.steps=1000000") as training:
            first = _newest(self._records)
            self._wait_for(first + 10, training)
            pids = {entry["rank"]: entry["pid"] for entry in self._ranks()}
            pid = pids[silent]
            lines_before = len(self._log("hang").read_text().splitlines())
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            try:
                named_s = _seconds_until(
                    lambda: f"did not come: rank {silent}\n" in self._log("hang").read_text(errors="replace"),
                    began,
                )
                gone_s = _seconds_until(lambda: not any(map(_is_alive, pids.values())), began)
                code = training.exit_code(within_s=TIME_LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        lines = self._log("hang").read_text(errors="replace").splitlines()[lines_before:]
        naming = [line for line in lines if f"rank {silent}" in line]
        return {
            "code": code, "named_s": named_s, "gone_s": gone_s, "launcher_s": time.monotonic() - began,
            "limit_s": TIMEOUT_S, "lines": len(lines),
            "naming": naming[:5], "num_naming": len(naming), "silent": silent,
        }  # fmt: skip

    @property
    def _records(self) -> Path:
        return self._filesystem.storage / "run" / "metrics" / "rank-00000.jsonl"

    def _ranks(self) -> list[dict[str, Any]]:
        environment = json.loads((self._filesystem.storage / "run" / "environment.json").read_text())
        return list(environment["ranks"])

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _lines(self, name: str, kind: str) -> list[list[list[str]]]:
        """Returns the words of each line of each rank's file."""
        notes = self._directory / name
        return [
            [line.split() for line in (notes / f"{kind}-{rank}").read_text().splitlines()]
            for rank in range(self._num_ranks)
        ]

    @contextlib.contextmanager
    def _started(self, name: str, *overrides: str) -> Iterator[Training]:
        notes = self._directory / name
        notes.mkdir()
        shared = self._filesystem.place
        every = [
            f"run.directory={shared / 'run'}", f"data.train={shared / 'data' / 'train'}", f"limits.step_s={TIMEOUT_S}",
            f"run.backend={self._backend}", f"data.global_batch={SAMPLES_PER_RANK * self._num_ranks}", *overrides,
        ]  # fmt: skip
        words = [word for override in every for word in ("--set", override)]
        environ = {
            **user_environment(), "HPCTRAIN_GROWTH": str(notes), "LD_PRELOAD": str(self._library),
            "PYTHONPATH": str(REPOSITORY),
        }  # fmt: skip
        training = Training(f"{name} run", mark=str(shared / "run"), log=self._log(name))
        self._began = time.time()
        training.launch(
            [*self._launch(), "hpctrain", "train", "benchmarks/growth/recipe.toml", *words], environ=environ
        )
        try:
            yield training
        finally:
            training.end()

    def _wait_for(self, step: int, training: Training) -> None:
        training.wait_until(
            lambda: _newest(self._records) >= step, within_s=TIME_LIMIT_S, what=lambda: f"no step {step}"
        )

    def _expect(self, code: int, training: Training) -> None:
        found = training.exit_code(within_s=TIME_LIMIT_S)
        if found != code:
            raise RanksFailed(f"exit code {found} instead of {code}: {' | '.join(training.lines()[-12:])}")


def _seconds_until(condition: Callable[[], bool], began: float) -> float:
    """Returns the seconds since `began` when the condition holds; infinity if it does not within `TIME_LIMIT_S`."""
    while not condition():
        if time.monotonic() > began + TIME_LIMIT_S:
            return math.inf
        time.sleep(0.1)
    return time.monotonic() - began


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _newest(path: Path) -> int:
    """Returns the newest step in a file of records, 0 if there is none."""
    if not path.exists():
        return 0
    return max((record["step"] for record in read_records(path) if record["kind"] == "step"), default=0)
