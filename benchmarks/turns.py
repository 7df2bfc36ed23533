"""Trainings as processes of their own, which may take turns: each is started once, as a user starts it, and waits or is
stopped between its turns.

Starting takes longer than a turn. A training that is stopped (SIGSTOP) does not slow the others, since Horovod's
threads and Open MPI's polling are stopped with their processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.places import RanksFailed
from benchmarks.starting import REPOSITORY, without_places

POLL_S = 0.02
_END_S = 20.0
_LAST_LINES = 30
# Set for each rank by mpirun, and by srun with PMIx; not for the launcher itself.
_OF_A_RANK = {b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK"}


def mpirun(num_ranks: int) -> list[str]:
    """Returns the command that Horovod's documentation names."""
    return [
        "mpirun",
        "-np",
        str(num_ranks),
        "-H",
        f"localhost:{num_ranks}",
        *["-bind-to", "none", "-map-by", "slot"],
    ]


class Training:
    """The launcher and the ranks of a training.

    mark: a word of each rank's command line, or what follows `=` in one, by which its processes are found, also those
    in a cluster's namespaces. log: file for their output. cwd: their working directory, if other measurements may have
    the same mark elsewhere. poll_s: time between two looks at what is waited for.
    """

    def __init__(
        self, name: str, *, mark: str, log: Path, cwd: Path | None = None, poll_s: float = POLL_S
    ) -> None:
        self.name, self._mark, self._log, self._cwd, self._poll_s = name, mark, log, cwd, poll_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: list[int] = []

    def launch(self, argv: Sequence[str], *, environ: Mapping[str, str]) -> None:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                list(argv), cwd=self._cwd or REPOSITORY, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_until(self, holds: Callable[[], bool], *, within_s: float, what: Callable[[], str]) -> None:
        """Raises RanksFailed with the last lines if the launcher ends before, or the time is over.

        what: returns what is said then, such as how far the ranks came."""
        assert self._process is not None
        until_s = time.monotonic() + within_s
        while not holds():
            if self._process.poll() is not None:
                raise self._failure(f"ended with exit code {self._process.returncode}")
            if time.monotonic() > until_s:
                raise self._failure(f"{what()} within {within_s:g} s")
            time.sleep(self._poll_s)

    def exit_code(self, *, within_s: float) -> int:
        """Waits for the launcher's end. Raises RanksFailed if the time is over before."""
        assert self._process is not None
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise self._failure(f"has not ended within {within_s:g} s") from None

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        assert self._process is not None
        return self._process.pid

    def _failure(self, what: str) -> RanksFailed:
        tail = without_places("\n".join(self.lines()[-_LAST_LINES:]), directory=self._log.parent)
        return RanksFailed(f"{self.name} {what}. Its last lines:\n{tail}")

    def lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    def stop(self) -> None:
        self._stopped = self._stopped or self.processes(ranks_only=True)
        _signal_all(self._stopped, signal.SIGSTOP)

    def resume(self) -> None:
        _signal_all(self._stopped, signal.SIGCONT)

    def kill_ranks(self) -> None:
        _signal_all(self.processes(ranks_only=True), signal.SIGKILL)

    def end(self) -> None:
        """Ends all processes; ranks that end by themselves have some time for it."""
        self.resume()
        if self._process is None:
            return
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
        _signal_all(self.processes(), signal.SIGKILL)  # those of a launcher that was killed
        self._process = None

    def processes(self, *, ranks_only: bool = False) -> list[int]:
        """Returns the ids of the processes: of the ranks, and of the launcher unless ranks_only."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                names = {item.partition(b"=")[0] for item in (entry / "environ").read_bytes().split(b"\0")}
                is_here = self._cwd in (None, Path(os.readlink(entry / "cwd")))
            except OSError:
                continue  # the process has ended
            marked = any(word.rpartition(b"=")[2] == os.fsencode(self._mark) for word in words)
            if marked and is_here and (names & _OF_A_RANK or not ranks_only):
                found.append(int(entry.name))
        return found


def _signal_all(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
