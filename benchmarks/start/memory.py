"""Memory of the processes of a launch, while its ranks wait after some steps of digits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.start.kinds import NAMES, alone, is_server
from benchmarks.start.runs import STARTS_BY_ITSELF, TIMEOUT_S, RunFailed, Workplace
from benchmarks.start.task import FOLDER_VARIABLE, GO, STEPS_VARIABLE
from benchmarks.starting import REPOSITORY, user_environment

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


def measure(place: Workplace, *, kind: str, num_ranks: int, steps: int) -> Memory:
    """Starts a training, and returns the memory when every rank has made `steps` steps. Raises RunFailed."""
    command, folder = place.training(
        f"run.epochs={1 + steps // _STEPS_PER_EPOCH}", "task.target=benchmarks.start.task:Held"
    )
    notes = Path(f"{folder}.held")
    notes.mkdir()
    environ = {
        **user_environment(), "PYTHONPATH": str(REPOSITORY), FOLDER_VARIABLE: str(notes), STEPS_VARIABLE: str(steps),
    }  # fmt: skip
    what = f"{num_ranks} ranks, {NAMES[kind]}, held after {steps} steps"
    with (
        tempfile.TemporaryFile() as output,
        _launched(
            alone(kind, command, num_ranks=num_ranks), environ=environ, output=output.fileno()
        ) as launcher,
    ):
        _wait_for_ranks(notes, launcher, num_ranks=num_ranks, what=what)
        found = _read(launcher.pid, ranks={int(path.name) for path in notes.iterdir()})
        (notes / GO).touch()
        try:
            code = launcher.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{what}: still running after {TIMEOUT_S:g} s, ended") from None
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code != 0 or STARTS_BY_ITSELF in text:
        raise RunFailed(f"{what}: exit code {code}\n{text[-2000:]}")
    return found


@contextlib.contextmanager
def _launched(
    argv: Sequence[str], *, environ: Mapping[str, str], output: int
) -> Iterator[subprocess.Popen[bytes]]:
    launcher = subprocess.Popen(
        list(argv), cwd=REPOSITORY, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield launcher
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if launcher.poll() is None:
                os.killpg(launcher.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(20)


def _wait_for_ranks(notes: Path, launcher: subprocess.Popen[bytes], *, num_ranks: int, what: str) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while len(list(notes.iterdir())) < num_ranks:
        if launcher.poll() is not None or time.monotonic() > until_s:
            raise RunFailed(f"{what}: not all ranks came so far")
        time.sleep(0.05)
    time.sleep(0.2)  # the last one waits by now


def _read(launcher: int, *, ranks: set[int]) -> Memory:
    """Returns the memory of a launcher's descendants that are ranks, clients or servers."""
    pss: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for process in psutil.Process(launcher).children(recursive=True):
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
