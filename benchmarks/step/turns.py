"""Training runs that alternate: each is started once, as a user starts it, and is stopped between its turns.

Starting takes longer than a turn. So all runs of a cell are started one after another and stopped with SIGSTOP after
their warm-up steps; for a turn one of them continues (SIGCONT) for a number of steps. A stopped run does not slow the
others, since Horovod's threads and Open MPI's polling are stopped with their processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.step.places import Place, launch_words
from benchmarks.step.variants import Variant

POLL_S = 0.05
END_S = 20.0
LAST_LINES = 15


class RunFailed(RuntimeError):
    """A run ended, or made no step within the time limit."""


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
        self,
        variant: Variant,
        *,
        recipe: str,
        place: Place,
        directory: Path,
        number: int,
        start_s: float,
        turn_s: float,
    ) -> None:
        self.variant = variant
        self._recipe = recipe
        self._place = place
        self._directory = directory
        self._name = f"runs/run-{number:03}"  # by which its processes are found too
        self._log = directory / f"run-{number:03}.log"
        self._start_s = start_s
        self._turn_s = turn_s
        metrics = directory / self._name / "metrics"
        paths = [metrics / f"rank-{rank:05}.jsonl" for rank in range(variant.num_ranks)]
        self._ranks = [StepRecords(path) for path in paths]
        self._process: subprocess.Popen[bytes] | None = None
        self._rank_pids: list[int] = []

    @property
    def command(self) -> list[str]:
        """Command line of each rank."""
        recipe = f"examples/{self._recipe}.toml"
        if self.variant.peer:
            alone = ["--alone"] if self.variant.alone else []
            return [sys.executable, "-m", "benchmarks.step.horovod_loop", recipe, self._name, *alone]
        length = "run.epochs=1000000" if self._recipe == "digits" else "run.steps=1000000"
        # A turn is controlled by the step records, so each must be written at once.
        fixed = [length, f"run.directory={self._name}", "telemetry.write_every_s=0"]
        overrides = [*fixed, *self.variant.overrides]
        words = [word for override in overrides for word in ("--set", override)]
        return ["hpctrain", "train", recipe, *words]

    def start(self, *, warmup_steps: int) -> None:
        """Starts the ranks, and stops them after `warmup_steps` steps. Raises RunFailed."""
        self._process = self._place.start(
            self.variant, self.command, directory=self._directory, log=self._log
        )
        self._wait_for(warmup_steps, until_s=time.monotonic() + self._start_s)
        self._rank_pids = self._processes(ranks_only=True)
        self._signal(signal.SIGSTOP)

    def turn(self, *, steps: int, settle: int, at_most_s: float) -> float:
        """Continues the ranks for `settle` steps that are not timed and `steps` that are; returns their samples/s.

        at_most_s: time after which the turn ends with fewer steps, at least one. Raises RunFailed.
        """
        firsts = [rank.read() + settle + 1 for rank in self._ranks]
        first = max(firsts)
        before = first - settle - 1
        self._signal(signal.SIGCONT)
        try:
            began_s = time.monotonic()
            self._wait_for(first, until_s=began_s + self._turn_s)
            self._wait_for(before + settle + steps, until_s=began_s + at_most_s, or_fail=False)
        finally:
            self._signal(signal.SIGSTOP)
        if self.variant.alone:
            return samples_per_s_apart(
                self._ranks, firsts=firsts, lasts=[rank.read() for rank in self._ranks]
            )
        last = min(self._read(), before + settle + steps)
        return samples_per_s(self._ranks, first=first, last=last)

    def environment(self) -> dict[str, Any]:
        """Content of the run's environment.json; {} for a peer."""
        path = self._directory / self._name / "environment.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def start_line(self) -> str:
        """Command line that started the ranks: the one that `hpctrain launch` printed, or the user's mpirun."""
        if self.variant.by_mpirun:
            set_by_user = [f"{name}={value}" for name, value in self.variant.environment]
            return " ".join([*set_by_user, *launch_words(self.variant, self.command)])
        lines = [line for line in self._lines() if line.startswith("hpctrain launch: ")]
        return next((line for line in lines if self._name in line), "").removeprefix("hpctrain launch: ")

    def end(self) -> None:
        """Ends all processes of the run."""
        if self._process is None:
            return
        self.kill_ranks()
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            try:
                self._process.wait(END_S)
                break
            except subprocess.TimeoutExpired:
                continue
        for pid in self._processes():  # a launcher that was killed
            _kill(pid, signal.SIGKILL)
        self._process = None

    def kill_ranks(self) -> None:
        for pid in self._processes(ranks_only=True):
            _kill(pid, signal.SIGKILL)

    def _wait_for(self, step: int, *, until_s: float, or_fail: bool = True) -> None:
        assert self._process is not None
        while self._read() < step:
            if self._process.poll() is not None:
                raise self._failure(f"ended with exit code {self._process.returncode}")
            if time.monotonic() > until_s:
                if not or_fail:
                    return
                raise self._failure(
                    f"made {self._read()} steps and did not reach step {step} within the time limit"
                )
            time.sleep(POLL_S)

    def _read(self) -> int:
        """Returns the newest step that all ranks have recorded."""
        return min(rank.read() for rank in self._ranks)

    def _failure(self, what: str) -> RunFailed:
        tail = "\n".join(self._lines()[-LAST_LINES:])
        return RunFailed(f"{self.variant.name} {what}. Its last lines:\n{tail}")

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._rank_pids:
            _kill(pid, number)

    def _processes(self, *, ranks_only: bool = False) -> list[int]:
        """Returns the ids of processes whose command line names this run's directory: launcher and ranks."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if not any(word.removeprefix("run.directory=") == self._name for word in words):
                    continue
                if Path(os.readlink(entry / "cwd")) != self._directory:
                    continue  # of another measurement
                names = {item.partition(b"=")[0] for item in (entry / "environ").read_bytes().split(b"\0")}
            except OSError:
                continue  # the process has ended
            if not ranks_only or _RANK_VARIABLES & names:
                found.append(int(entry.name))
        return found


# Set for each rank by mpirun, and by srun with PMIx; not for the launcher itself.
_RANK_VARIABLES = {b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK"}


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
