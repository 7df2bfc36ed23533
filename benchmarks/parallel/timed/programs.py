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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.parallel.timed.methods import Method
from benchmarks.parallel.timed.waiting import END, POLL_S
from benchmarks.places import OnCluster, RanksFailed
from benchmarks.reduction.suite import USE_RING, YIELD
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
OPEN_MPI: dict[str, Mapping[str, str]] = {"ring": USE_RING, "yielding": YIELD}
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
    """On this machine: hpctrain's ranks by `hpctrain launch`, Horovod's by mpirun as its documentation says, torch's by
    torchrun."""
    program = ["-m", MODULE, method.name, str(directory)]
    variables = _variables(method)
    environ = {**user_environment(), **variables}
    if method.is_ours:
        typed = [*LAUNCH, "-n", str(num_ranks), "--", sys.executable, *program]
    elif method.interface:
        mpirun = ["mpirun", "-np", str(num_ranks), "-H", f"localhost:{num_ranks}", "-bind-to", "none"]
        typed = [*mpirun, "-map-by", "slot", sys.executable, *program]
        if os.geteuid() == 0:  # as `hpctrain launch` does
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        typed = [sys.executable, *torchrun, *program]
        variables = {"GLOO_SOCKET_IFNAME": "lo"}
        environ |= variables
    return Command(argv=typed, typed=typed, environ=environ, variables=variables)


def _variables(method: Method) -> dict[str, str]:
    """Returns the environment variables that the user of a Horovod script sets; none for hpctrain's."""
    if method.is_ours or not method.interface:
        return {}
    of_mpi = {name: value for key in method.mpi for name, value in OPEN_MPI[key].items()}
    return {"OMP_NUM_THREADS": "1", **of_mpi}


def on_cluster(method: Method, directory: Path, *, place: OnCluster, number: int) -> Command:
    """The same in a Slurm job with one core of each node; a peer's ranks by srun: Horovod's with PMIx, torch's with its
    env:// initialisation.

    number: of the method; peers that live at the same time have ports of their own.
    """
    program = [sys.executable, "-m", MODULE, method.name, str(directory)]
    nodes, on_each = place.num_nodes, place.ranks_per_node
    salloc = ["salloc", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    variables = _variables(method)
    if method.is_ours:
        ranks = ["-n", str(nodes * on_each), "--ranks-per-node", str(on_each)]
        typed = [*salloc, *LAUNCH, *ranks, "--", *program]
    else:
        pmix = ["--mpi=pmix"] if method.interface else []
        tasks = [f"--nodes={nodes}", f"--ntasks={nodes * on_each}", f"--ntasks-per-node={on_each}"]
        typed = [
            *salloc,
            "srun",
            *pmix,
            *tasks,
            "--distribution=block",
            "--kill-on-bad-exit=1",
            "--overcommit",
            *program,
        ]
        if method.interface:
            variables["SLURM_PMIX_FENCE"] = "ring"  # as slurm/train.sbatch says
        else:
            variables |= {
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": place.cluster.node_names[0], "MASTER_PORT": str(_FIRST_PORT + number),
            }  # fmt: skip
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
    rank that waits longer for its turn ends. Raises RanksFailed with their last lines.

    Ranks of a Horovod script are stopped (SIGSTOP) between their turns: Horovod's thread and Open MPI poll even when
    there is nothing to do.
    """

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
        self._stopped: list[int] = []  # processes
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
        self._stop()
        ended = Ended(returncode=0, stdout="", stderr=self._log.read_text(errors="replace"))
        start = start_of(
            command.typed, ended, variables=command.variables, ranks=[one["facts"] for one in ready],
            directory=self.directory,
        )  # fmt: skip
        return fmean(one["loss"] for one in ready), start

    def turn(self) -> Turn:
        """Has the ranks take a turn."""
        (self.directory / f"turn-{self._turn}").touch()
        self._continue()
        found = self._wait_for(f"done-{self._turn}-{{}}.json")
        self._stop()
        self._turn += 1
        exposed = [one["exposed_s"] for one in found if one["exposed_s"] is not None]
        return Turn(step_s=max(one["step_s"] for one in found), exposed_s=max(exposed, default=None))

    def end(self) -> None:
        """Ends the ranks."""
        (self.directory / END).touch()
        self._continue()
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

    def _stop(self) -> None:
        if self.method.interface:
            self._stopped = ranks_in(self.directory)
            _signal_all(self._stopped, signal.SIGSTOP)

    def _continue(self) -> None:
        _signal_all(self._stopped, signal.SIGCONT)
        self._stopped = []

    def _terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def ranks_in(directory: Path) -> list[int]:
    """Returns the processes that are ranks of the method with this directory, also those in a cluster's namespaces."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            names = {item.partition(b"=")[0] for item in (entry / "environ").read_bytes().split(b"\0")}
        except OSError:
            continue  # the process has ended
        if os.fsencode(directory) in words and names & _OF_A_RANK:
            found.append(int(entry.name))
    return found


# Set for each rank by mpirun, and by srun with PMIx; not for the launcher itself.
_OF_A_RANK = {b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK"}


def _signal_all(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _nothing() -> None: ...
