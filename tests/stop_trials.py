"""Stops a run at random moments by a signal to one random rank, until it has finished, and checks what is left.

The ranks are started by what the test hands in: mpirun here, or srun on a Slurm cluster.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from sklearn.datasets import load_digits

from hpctrain.checkpoint import compare, finished_newest_first, partial_files, step_of, verify
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import pack_arrays
from hpctrain.errors import ExitCode
from hpctrain.telemetry import read_records
from tests.states import wait_for

SAMPLES, EPOCHS, GLOBAL_BATCH = 480, 2, 24  # 40 steps

# A save of the state, 1.3 MB with its two moments, takes each of the ranks about half a second.
RECIPE = f"""
[run]
name = "trials"
directory = "run"
epochs = {EPOCHS}
[task]
target = "tests.faults.faulty_tasks:SamplesWrittenDown"
options = {{ width = 32, step_s = 0.05 }}
[data]
train = "data"
global_batch = {GLOBAL_BATCH}
[optimizer]
lr = 1e-3
[reduction]
algorithm = "flat"
[checkpoint]
every_steps = 6
limit_mb_per_s = 1.0
[telemetry]
write_every_s = 0.0
progress_every_s = 0.2
"""

# Marks the ranks of one start, so that they are found among all processes of the machine.
MARK = "HPCT_TRIAL"


class Started(Protocol):
    """A start of the ranks."""

    @property
    def output(self) -> str: ...
    def wait(self, *, timeout_s: float) -> int: ...


# Starts `hpctrain train ARGUMENTS` on the ranks, in a folder and with these variables.
Start = Callable[[Sequence[str], Path, Mapping[str, str]], AbstractContextManager[Started]]


@dataclass(kw_only=True)
class Outcome:
    """What was counted. `num_in_saves`: signals that came while a checkpoint was being written."""

    num_signals: int = 0
    num_in_saves: int = 0
    num_before_first_step: int = 0
    num_stops: int = 0
    num_runs: int = 0
    exit_s: list[float] = field(default_factory=list)  # from the signal to the end of the ranks

    def describe(self) -> str:
        return (
            f"{self.num_signals} signals to one rank, {self.num_before_first_step} before the first step, "
            f"{self.num_in_saves} in a save: {self.num_stops} stops with code 75, {self.num_runs} runs finished and "
            f"equal to the bit; from the signal to the end {np.median(self.exit_s):.1f} s (median), at most "
            f"{max(self.exit_s):.1f} s"
        )


class StopTrials:
    """num_ranks: that `start` starts. timeout_s: a start that takes longer hangs."""

    def __init__(
        self, start: Start, *, num_ranks: int, directory: Path, seed: int, timeout_s: float = 300
    ) -> None:
        self._start = start
        self._num_ranks = num_ranks
        self.directory = directory
        self._random = random.Random(seed)
        self._timeout_s = timeout_s
        self._start_s = 0.0  # from the first sight of a rank to its first step
        prepare(directory)

    def run(self, moments: Sequence[str]) -> Outcome:
        """One signal for each of `moments`, over as many runs as that takes; the last run is finished without."""
        outcome, left = Outcome(), list(moments)
        self._uninterrupted()
        while left or (self.directory / "run").exists():
            moment = left.pop(0) if left else None
            code = self._attempt(moment, outcome)
            if code == ExitCode.DONE:
                self._check_finished()
                outcome.num_runs += 1
                shutil.rmtree(self.directory / "run")
                shutil.rmtree(self.directory / "seen")
            else:
                self._check_stopped(outcome)
        return outcome

    # ------------------------------------------------------------------ attempts

    def _uninterrupted(self) -> None:
        began_s, mark = time.monotonic(), f"whole-{os.getpid()}"
        with self._started("whole", mark=mark, seen="seen-whole") as ranks:
            self._wait_for(lambda: len(ranks_marked(mark)) == self._num_ranks, ranks)
            self._wait_for(lambda: "step 1/" in ranks.output, ranks)
            self._start_s = time.monotonic() - began_s
            assert ranks.wait(timeout_s=self._timeout_s) == ExitCode.DONE, ranks.output

    def _attempt(self, moment: str | None, outcome: Outcome) -> int:
        mark = f"trial-{outcome.num_signals}-{os.getpid()}"
        with self._started("run", mark=mark, seen="seen") as ranks:
            if moment is not None:
                self._signal(moment, mark=mark, ranks=ranks, outcome=outcome)
                sent_s = time.monotonic()
            code = ranks.wait(timeout_s=self._timeout_s)
            if moment is not None:
                outcome.exit_s.append(time.monotonic() - sent_s)
            allowed = (ExitCode.DONE,) if moment is None else (ExitCode.DONE, ExitCode.STOPPED_EARLY)
            assert code in allowed, f"moment {moment!r}: exit code {code}\n{ranks.output}"
        return code

    def _signal(self, moment: str, *, mark: str, ranks: Started, outcome: Outcome) -> None:
        """Waits for the moment and sends SIGUSR1 or SIGTERM to one random rank."""
        rank = self._random.randrange(self._num_ranks)
        number = self._random.choice([signal.SIGUSR1, signal.SIGTERM])
        self._wait_for(lambda: rank in ranks_marked(mark), ranks)
        if moment == "start":
            time.sleep(self._random.uniform(0, self._start_s))
        elif moment == "any":
            time.sleep(self._random.uniform(0, self._start_s + 3))
        else:
            self._wait_for(lambda: "\nstep " in f"\n{ranks.output}", ranks)
            if moment == "save":
                self._wait_for(lambda: self._is_saving() or self._has_ended(mark), ranks)
            time.sleep(self._random.uniform(0, 0.2 if moment == "save" else 1.5))
        outcome.num_signals += 1
        outcome.num_before_first_step += "\nstep " not in f"\n{ranks.output}"
        outcome.num_in_saves += self._is_saving()
        pid = ranks_marked(mark).get(rank)
        if pid is not None:  # None: the run has finished meanwhile
            os.kill(pid, number)

    def _started(self, name: str, *, mark: str, seen: str) -> AbstractContextManager[Started]:
        (self.directory / seen).mkdir(exist_ok=True)
        arguments = ["recipe.toml", "--set", f"run.directory={name}"]
        return self._start(arguments, self.directory, {MARK: mark, "SEEN": str(self.directory / seen)})

    def _wait_for(self, condition: Callable[[], object], ranks: Started) -> None:
        wait_for(condition, says=lambda: ranks.output, timeout_s=self._timeout_s, every_s=0.01)

    def _has_ended(self, mark: str) -> bool:
        return not ranks_marked(mark)

    def _is_saving(self) -> bool:
        directory = self.directory / "run" / "checkpoints"
        return directory.exists() and bool(partial_files(directory))

    # ------------------------------------------------------------------ checks

    def _check_stopped(self, outcome: Outcome) -> None:
        """One step on all ranks, its checkpoint the newest and whole, and nothing half written."""
        outcome.num_stops += 1
        steps = set()
        for rank in range(self._num_ranks):
            records = list(read_records(self.directory / "run" / "metrics" / f"rank-{rank:05}.jsonl"))
            assert records[-1]["kind"] == "stopped", f"rank {rank}: {records[-1]}"
            steps.add(records[-1]["step"])
        assert len(steps) == 1
        checkpoints = self.directory / "run" / "checkpoints"
        newest = finished_newest_first(checkpoints)[0]
        assert step_of(newest) in steps
        assert partial_files(checkpoints) == []
        (found,) = verify(newest, comm=SerialWorld())
        assert found.damage == ()

    def _check_finished(self) -> None:
        """Equal to the uninterrupted run to the bit, and each sample once per epoch."""
        check_equal(self.directory / "run", self.directory / "whole")
        for name in ("seen", "seen-whole"):
            assert samples_seen(self.directory / name) == dict.fromkeys(range(SAMPLES), EPOCHS)


def prepare(directory: Path) -> None:
    """Makes `data` and `recipe.toml` in an existing folder."""
    images, labels = load_digits(return_X_y=True)
    fields = {
        "image": images[:SAMPLES].reshape(-1, 1, 8, 8).astype(np.float32),
        "label": labels[:SAMPLES].astype(np.int64),
        "id": np.arange(SAMPLES),
    }
    pack_arrays(directory / "data", fields)
    (directory / "recipe.toml").write_text(RECIPE)


def check_equal(first: Path, second: Path) -> None:
    """The newest checkpoints of two runs hold the same tensors, to the bit."""
    last = [finished_newest_first(run / "checkpoints")[0] for run in (first, second)]
    difference = compare(*last, comm=SerialWorld())
    different = (*difference.changed, *difference.only_in_first, *difference.only_in_second)
    assert different == ()
    assert difference.num_same > 0


def samples_seen(folder: Path) -> dict[int, int]:
    """How often each sample was computed, from what `SamplesWrittenDown` wrote in `folder`."""
    counts = Counter(int(word) for path in folder.iterdir() for word in path.read_text().split())
    return dict(sorted(counts.items()))


def ranks_marked(mark: str) -> dict[int, int]:
    """Rank -> process id of the ranks of one start, on this machine or on any node of its clusters."""
    found: dict[int, int] = {}
    for pid, (command, environ) in processes_marked(mark).items():
        rank = environ.get(b"OMPI_COMM_WORLD_RANK", environ.get(b"PMIX_RANK"))
        if b"python" in command and rank is not None:
            found[int(rank)] = min(pid, found.get(int(rank), pid))
    return found


def processes_marked(mark: str) -> dict[int, tuple[bytes, dict[bytes, bytes]]]:
    """Process id -> command line and environment of all processes of one start, also of launchers."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            items = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        environ = dict(item.partition(b"=")[::2] for item in items)
        if environ.get(MARK.encode()) == mark.encode():
            found[int(entry.name)] = (command, environ)
    return found


def moments_of(num: int) -> list[str]:
    """A quarter of them each in the start, in saves, in steps and at any moment; at least one of the first three."""
    quarter = max(1, num // 4)
    fixed = [kind for kind in ("start", "save", "steps") for _ in range(quarter)]
    mixed = [*fixed, *["any"] * (num - len(fixed))]
    random.Random(num).shuffle(mixed)
    return mixed
