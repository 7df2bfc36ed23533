"""The benchmark's side of taking turns: starts a method's ranks as its user does, and has them make steps in turns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.parallel.timed.methods import Method
from benchmarks.parallel.timed.waiting import END, POLL_S
from benchmarks.reduction.places import OnCluster, RanksFailed
from benchmarks.starting import (
    LAUNCH,
    REPOSITORY,
    Ended,
    Start,
    start_of,
    user_environment,
    without_places,
)

MODULE = "benchmarks.parallel.timed.ranks"
_FIRST_PORT = 29_500  # what torch's documentation shows
_END_S = 20.0
_LAST_LINES = 30


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a user types, and in which environment. variables: those that the benchmark sets; `environ` has them."""

    argv: list[str]
    typed: list[str]
    environ: Mapping[str, str]
    variables: Mapping[str, str]


def on_node(method: Method, directory: Path, *, num_ranks: int) -> Command:
    """hpctrain's ranks by `hpctrain launch`, a peer's by torchrun, on this machine."""
    program = ["-m", MODULE, method.name, str(directory)]
    if method.layout is None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        typed = [sys.executable, *torchrun, *program]
    else:
        typed = [*LAUNCH, "-n", str(num_ranks), "--", sys.executable, *program]
    variables = {"GLOO_SOCKET_IFNAME": "lo"} if method.layout is None else {}
    return Command(argv=typed, typed=typed, environ={**user_environment(), **variables}, variables=variables)


def on_cluster(method: Method, directory: Path, *, place: OnCluster, number: int) -> Command:
    """The same in a Slurm job with one core of each node; a peer's ranks by srun, with torch's env:// initialisation.

    number: of the method; peers that live at the same time have ports of their own.
    """
    program = [sys.executable, "-m", MODULE, method.name, str(directory)]
    nodes, on_each = place.num_nodes, place.ranks_per_node
    salloc = ["salloc", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    if method.layout is None:
        tasks = [f"--nodes={nodes}", f"--ntasks={nodes * on_each}", f"--ntasks-per-node={on_each}"]
        typed = [
            *salloc,
            "srun",
            *tasks,
            "--distribution=block",
            "--kill-on-bad-exit=1",
            "--overcommit",
            *program,
        ]
        variables = {
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": place.cluster.node_names[0], "MASTER_PORT": str(_FIRST_PORT + number),
        }  # fmt: skip
    else:
        ranks = ["-n", str(nodes * on_each), "--ranks-per-node", str(on_each)]
        typed = [*salloc, *LAUNCH, *ranks, "--", *program]
        variables = {}
    argv = place.cluster.argv(typed, cwd=REPOSITORY)
    return Command(argv=argv, typed=typed, environ={**place.environment(), **variables}, variables=variables)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Seconds of a step in a turn, on the slowest rank. exposed_s: of it without computing, on the rank that waited
    most; None where that is not known."""

    step_s: float
    exposed_s: float | None


class Program:
    """The ranks of a method. directory: its own, which all ranks see. timeout_s: of the start, and of a turn. idle_s: a
    rank that waits longer for its turn ends. Raises RanksFailed with their last lines."""

    def __init__(
        self,
        method: Method,
        directory: Path,
        *,
        num_ranks: int,
        settings: Mapping[str, Any],
        timeout_s: float,
        idle_s: float,
    ) -> None:
        self.method = method
        self.directory = directory
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._turn = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "log"
        directory.mkdir()
        (directory / "settings.json").write_text(json.dumps({**settings, "idle_s": idle_s}))

    def start(self, command: Command) -> tuple[float, Start]:
        """Starts the ranks and waits for the end of their warm-up steps. Returns the loss of the last one, the mean of
        the ranks, and how they were started."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command.argv, cwd=REPOSITORY, env=dict(command.environ), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        ready = self._wait_for("ready-{}.json")
        ended = Ended(returncode=0, stdout="", stderr=self._log.read_text(errors="replace"))
        start = start_of(
            command.typed, ended, variables=command.variables, ranks=[one["facts"] for one in ready],
            directory=self.directory,
        )  # fmt: skip
        return fmean(one["loss"] for one in ready), start

    def turn(self) -> Turn:
        """Has the ranks take a turn."""
        (self.directory / f"turn-{self._turn}").touch()
        found = self._wait_for(f"done-{self._turn}-{{}}.json")
        self._turn += 1
        exposed = [one["exposed_s"] for one in found if one["exposed_s"] is not None]
        return Turn(step_s=max(one["step_s"] for one in found), exposed_s=max(exposed, default=None))

    def end(self) -> None:
        """Ends the ranks."""
        (self.directory / END).touch()
        if self._process is None:
            return
        for act in (_nothing, self._terminate, self._kill):
            act()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
        self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wait_for(self, name: str) -> list[Any]:
        """Returns the contents of a file of each rank, when all are there."""
        assert self._process is not None
        until_s = time.monotonic() + self._timeout_s
        paths = [self.directory / name.format(rank) for rank in range(self._num_ranks)]
        while not all(path.exists() for path in paths):
            if self._process.poll() is not None:
                raise self._failure(f"ended with exit code {self._process.returncode}")
            if time.monotonic() > until_s:
                raise self._failure(f"not ready after {self._timeout_s:g} s")
            time.sleep(POLL_S)
        return [json.loads(path.read_text()) for path in paths]

    def _failure(self, what: str) -> RanksFailed:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        return RanksFailed(f"{self.method.name} {what}: {without_places(tail, directory=self.directory)}")

    def _terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _nothing() -> None: ...
