"""Training the digits in jobs of the cluster: what the tests submit, and what the jobs have printed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tests import states
from tests.cluster.cluster import Cluster
from tests.cluster.record import ClusterError
from tests.ranks_launcher import REPOSITORY

RECIPE = str(REPOSITORY / "examples" / "digits.toml")
# A task that mostly sleeps: the cores are needed for other ranks.
SLOW = ["--set", "telemetry.progress_every_s=0.5", "--set", "task.target=tests.faults.faulty_tasks:Slow"]
# At least 9 s: a busy machine takes seconds to hand on the signal that is to come before the end.
STOPPED = [*SLOW, "--set", "run.epochs=20"]
LONG = [*SLOW, "--set", "run.epochs=2000"]


class Running:
    """A command on the cluster, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, *, timeout_s: float) -> int:
        return self._process.wait(timeout_s)


@contextmanager
def running(
    cluster: Cluster, command: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> Iterator[Running]:
    """Starts a command on the head, in a folder with these variables; kills it at the end if it still runs."""
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            cluster.argv(command, cwd=folder, env=environ), env=cluster.environment(), stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield Running(process, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def output(folder: Path) -> str:
    """What the jobs of a folder have printed."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("slurm-*.out")))


def wait_for(condition: Callable[[], Any], *, folder: Path, timeout_s: float = 300) -> Any:
    """What `condition` returns, once it is true. Fails with what the jobs of `folder` have printed."""
    return states.wait_for(condition, says=lambda: output(folder), timeout_s=timeout_s, every_s=0.1)


def trains(folder: Path, *, num_lines: int = 2) -> Callable[[], bool]:
    """Whether the ranks have come to some steps."""
    return lambda: output(folder).count("\nstep ") >= num_lines


class LimitWatch:
    """Asks every second when Slurm will end a job, and notes how long before that it has ended by itself.

    left_s: for each time that it ended, the seconds that were left of its limit.
    """

    def __init__(self, cluster: Cluster, job: int) -> None:
        self.left_s: list[float] = []
        self._cluster, self._job = cluster, job
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        limit: float | None = None
        while not self._closed.wait(1.0):
            try:
                facts = self._cluster.job(self._job)
            except ClusterError:  # a controller that is busy
                continue
            if facts["JobState"] == "RUNNING":
                limit = datetime.fromisoformat(facts["EndTime"]).timestamp()
            elif limit is not None:
                self.left_s.append(limit - time.time())
                limit = None
