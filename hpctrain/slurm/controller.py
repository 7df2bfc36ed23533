"""Runs Slurm's commands: each with a time limit, and a few times again while the controller is busy."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpctrain.errors import LaunchError
from hpctrain.slurm.refusals import answer_may_be_lost, is_busy, what_to_change

# 2 minutes and a half in all: a controller that is restarted is back by then.
WAITS_S = (5.0, 15.0, 40.0, 90.0)


class SlurmRefused(LaunchError):
    """Slurm answered a command with an error."""


class SlurmUnavailable(LaunchError):
    """Slurm's controller did not answer, also after several attempts."""


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Slurm's controller, reached through its commands.

    waits_s: pauses between attempts. timeout_s: of one attempt. say: prints why it waits.
    """

    waits_s: Sequence[float] = WAITS_S
    timeout_s: float = 60.0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    say: Callable[[str], None] = lambda text: None

    def ask(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        done_before: Callable[[], str | None] = lambda: None,
        stream: Literal["stdout", "stderr"] = "stdout",
    ) -> str:
        """Runs a command and returns what it printed to `stream`, once it succeeds.

        done_before: called before another attempt of a command whose answer may have been lost; what it returns is the
        answer, unless it is None.
        Raises SlurmRefused, SlurmUnavailable, or LaunchError if the command is not installed.
        """
        program = shutil.which(words[0], path=self.environ.get("PATH"))
        if program is None:
            raise LaunchError(
                f"there is no {words[0]} on the PATH: run this on a login node of the cluster, or load Slurm's module"
            )
        last = ""
        for wait_s in [*self.waits_s, None]:
            lost = False
            try:
                done = subprocess.run(
                    [program, *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                    timeout=self.timeout_s, env=dict(self.environ), cwd=cwd, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                last, lost = f"no answer within {self.timeout_s:.0f} s", True
            else:
                if done.returncode == 0:
                    return done.stdout if stream == "stdout" else done.stderr
                lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
                last = lines[-1] if lines else ""  # the ones before it are of the command's own attempts
                if not is_busy(last):
                    raise SlurmRefused(_refusal(words, "; ".join(lines), done.returncode))
                lost = answer_may_be_lost(last)
            if wait_s is None:
                break
            self.say(f"{words[0]}: {last}; trying again in {wait_s:.0f} s")
            time.sleep(wait_s)
            if lost and (answer := done_before()) is not None:
                return answer
        raise SlurmUnavailable(
            f"{words[0]} failed {len(self.waits_s) + 1} times: {last}. Slurm's controller does not answer: try again "
            "later; `scontrol ping` shows whether it is up"
        )


def _refusal(words: Sequence[str], text: str, code: int) -> str:
    change = what_to_change(text) if words[0] == "sbatch" else None
    found = text or f"exit code {code}, without a message"
    return f"{words[0]} refuses: {found}" + (f". What to do: {change}" if change else "")
