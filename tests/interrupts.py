"""Ctrl-C at a given moment of a run that `hpctrain launch` has started, with mpirun here or with srun on a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hpctrain.checkpoint import finished_newest_first, partial_files, verify
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import ExitCode
from tests.states import wait_for
from tests.stop_trials import MARK, Started, prepare, processes_marked, ranks_marked

# Started in a folder, with these overrides and this environment: `hpctrain launch ... -- hpctrain train recipe.toml`.
StartLaunch = Callable[[list[str], Path, dict[str, str]], AbstractContextManager[Started]]
MOMENTS = ("launch", "start", "steps", "save")
# From Ctrl-C to the end of all processes: within 5 s on a machine that is not busy.
ENDS_WITHIN_S = 60.0
# A save of 1.3 MB by two ranks or four takes longer than the test.
SLOW_SAVES = ["checkpoint.limit_mb_per_s=0.005"]


class Interrupts:
    """Starts runs in one folder and interrupts them. num_ranks: that `start` starts."""

    def __init__(self, start: StartLaunch, *, num_ranks: int, folder: Path) -> None:
        self._start = start
        self._num_ranks = num_ranks
        self.folder = folder
        prepare(folder)
        (folder / "seen").mkdir()

    def run(self, moment: str, *, presses: int = 1, settings: list[str] | None = None) -> tuple[int, str]:
        """Starts a run, presses Ctrl-C at the moment, and checks that nothing is left. Returns exit code and output.

        moment: `launch`, the launcher is started; `start`, a rank loads its libraries; `steps`; `save`, a checkpoint is
        being written. presses: a second one follows after half a second.
        """
        mark = f"{moment}-{presses}-{os.getpid()}"
        environ = {MARK: mark, "SEEN": str(self.folder / "seen")}
        with self._start(["run.epochs=1000", *(settings or [])], self.folder, environ) as started:
            wait_for(
                lambda: self._has_come(moment, mark=mark, started=started),
                says=lambda: started.output,
                every_s=0.02,
            )
            # The oldest: until it has become another program, a child has the command line of the launcher.
            launch = min(
                pid
                for pid, (command, _) in processes_marked(mark).items()
                if command.split(b"\0")[2:3] == [b"launch"] and b"python" in command
            )
            began_s = time.monotonic()
            for number in range(presses):
                time.sleep(0.5 if number else 0.0)
                os.kill(launch, signal.SIGINT)
            code = started.wait(timeout_s=300)
            wait_for(lambda: not processes_marked(mark), says=lambda: started.output, every_s=0.02)
            took_s = time.monotonic() - began_s
            print(f"Ctrl-C {presses} times, {moment}: all ended after {took_s:.1f} s, exit code {code}")
            assert took_s < ENDS_WITHIN_S, started.output
            return code, started.output

    def assert_checkpoints_are_whole(self) -> Path | None:
        """Returns the newest one; None if there is none."""
        checkpoints = self.folder / "run" / "checkpoints"
        for path in finished_newest_first(checkpoints) if checkpoints.exists() else []:
            (found,) = verify(path, comm=SerialWorld())
            assert found.damage == ()
            return path
        return None

    def _has_come(self, moment: str, *, mark: str, started: Started) -> bool:
        if moment == "launch":
            return "hpctrain train" in started.output
        if moment == "start":
            return len(ranks_marked(mark)) == self._num_ranks
        if moment == "steps":
            return "\nstep " in started.output
        directory = self.folder / "run" / "checkpoints"
        return directory.exists() and bool(partial_files(directory))

    def assert_one_ends_all_with_75(self, moment: str) -> str:
        """Returns what the run has printed."""
        code, printed = self.run(moment)
        assert code == ExitCode.STOPPED_EARLY, printed
        assert "SIGINT: asking the ranks to save and stop" in printed
        if moment in ("steps", "save"):
            assert "; the state is saved and verified in run/checkpoints" in printed
            assert self.assert_checkpoints_are_whole() is not None
        return printed

    def assert_two_end_a_long_save(self) -> None:
        before = self.assert_checkpoints_are_whole()
        code, printed = self.run("save", presses=2, settings=SLOW_SAVES)
        assert code == 128 + signal.SIGINT, printed
        assert "a second Ctrl-C: ending the ranks now (SIGTERM)" in printed
        assert self.assert_checkpoints_are_whole() == before
