"""Runs Slurm's commands with a time limit, can repeat them while the controller is busy, and parses their output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpctrain.errors import LaunchError

# The controller is overloaded, restarting or changing over to its backup. Texts of Slurm's slurm_errno.c and of the
# retries that its commands announce; the last ones are those of newer versions.
_BUSY = re.compile(
    r"Unable to contact slurm controller|Slurm temporarily unable to accept job|Slurm controller not responding"
    r"|Slurm backup controller in standby mode|Socket timed out on send/recv operation"
    r"|Zero Bytes were transmitted or received|Transport endpoint is not connected|Resource temporarily unavailable"
    r"|Connection (refused|timed out|reset by peer)|Unable to create job record, try again"
    r"|Job can not be altered now, try again later|[Ff]ailed to open persistent connection"
    r"|RPC (rate )?limit",
)
# The command may have been carried out although its answer was lost.
_ANSWER_LOST = re.compile(
    r"Socket timed out|Zero Bytes|receive failure|Connection (timed out|reset by peer)|Transport endpoint"
)

_CHANGES = (
    (r"invalid partition", "set slurm.partition to one that `sinfo --summarize` lists"),
    (
        r"nvalid account",
        "set slurm.account to one that `sacctmgr show associations user=$USER format=account,partition,qos` lists",
    ),
    (r"nvalid qos", "set slurm.qos to one that `sacctmgr show associations user=$USER format=account,qos` lists"),
    (r"group not permitted to use this partition", "set slurm.partition to one that this user may use"),
    (
        r"time limit is invalid",
        "lower slurm.time to the partition's limit, which `sinfo --format='%P %l'` shows",
    ),
    (
        r"Node count specification invalid|Requested partition configuration not available",
        "lower slurm.nodes or slurm.time to the partition's limits: `scontrol show partition`",
    ),
    (
        r"More processors requested|node configuration is not available|CPU count per node|more tasks than",
        "no node has this, or too few have: compare slurm.tasks_per_node x slurm.cpus_per_task, gpus_per_task, "
        "constraint and slurm.nodes with `sinfo --format='%P %D %c %m %G %f'`",
    ),
    (r"nvalid feature", "set slurm.constraint to features that `sinfo --format='%P %f'` lists"),
    (r"generic resource|nvalid GRES", "gpus_per_task: `sinfo --format='%P %G'` shows the GPUs of the nodes"),
    (r"reservation", "set slurm.reservation to one that `scontrol show reservation` lists"),
    (r"dependency", "slurm.dependency: write TYPE:JOB, such as afterok:1234, of a job that Slurm still knows"),
    (
        r"violates accounting/QOS policy",
        "the account or QOS allows fewer jobs, nodes or hours: wait for running jobs, or lower slurm.nodes or time",
    ),
    (r"[Aa]rray", "slurm.array or slurm.sweep: `scontrol show config | grep MaxArraySize` shows the largest index"),
    (r"nvalid --?mail-type", "slurm.mail_type: events are BEGIN, END, FAIL, REQUEUE, TIME_LIMIT_80, ALL"),
    (r"nrecognized option|unknown option|nvalid option", "slurm.options: this Slurm does not know the option"),
)  # fmt: skip


def is_busy(text: str) -> bool:
    """Returns True if the controller could not answer, but may be able to in a moment. text: output of the command."""
    return _BUSY.search(text) is not None


def answer_may_be_lost(text: str) -> bool:
    """Returns True if the controller may have carried out the command although the command failed."""
    return _ANSWER_LOST.search(text) is not None


def what_to_change(text: str) -> str | None:
    """Returns advice on what to change after sbatch has refused a job; None if Slurm's text is unknown."""
    return next((change for pattern, change in _CHANGES if re.search(pattern, text)), None)


# Runs Slurm's commands.


# 2 minutes and a half in all: a controller that is restarted is back by then.
WAITS_S = (5.0, 15.0, 40.0, 90.0)


class SlurmRefused(LaunchError):
    """Slurm answered a command with an error."""


class SlurmUnavailable(LaunchError):
    """Slurm's controller did not answer, even after several attempts."""


def _run(
    words: Sequence[str], *, timeout_s: float, environ: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command. The child process is created with vfork, which is safe with MPI's registered memory."""
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
        env=dict(environ), cwd=cwd, check=False,
    )  # fmt: skip


def ask_once(words: Sequence[str], *, timeout_s: float) -> str:
    """Runs a command once, for callers that cannot wait for a busy controller, and returns what it printed.

    Slurm prints times in seconds since 1970, and the user's SQUEUE_ variables do not change its output. Raises
    SlurmUnavailable, with the reason, if the command cannot be run, does not answer in time, or fails.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = _run(words, timeout_s=timeout_s, environ={**environ, "SLURM_TIME_FORMAT": "%s"})
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{words[0]} did not answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise SlurmUnavailable(f"{words[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SlurmUnavailable(f"{words[0]} failed: {lines[-1]}")
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class SlurmController:
    """Slurm's controller, reached through Slurm's commands.

    waits_s: pauses between attempts, in seconds.
    timeout_s: time limit of one attempt.
    environ: environment variables for the commands.
    say: function that prints why a command is repeated.
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
        """Runs a command until it succeeds, and returns what it printed to `stream`.

        done_before: function that is called before the command is repeated, if Slurm's answer to it may have been lost.
        If the function returns a text, this text is the answer, and the command is not repeated.

        Raises SlurmRefused if Slurm answers with an error, SlurmUnavailable if Slurm does not answer, and LaunchError
        if the command is not installed.
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
                done = _run([program, *words[1:]], timeout_s=self.timeout_s, environ=self.environ, cwd=cwd)
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


# Reads what the commands print. Pure.


_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def parse_duration(text: str) -> int | None:
    """Returns a duration in seconds: `1-02:03:04`, `02:03:04`, `3:04`, `30 sec` or `30`; None for UNLIMITED etc."""
    if match := re.fullmatch(r"(\d+)(?: sec)?", text):
        return int(match[1])
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return seconds + 60 * (minutes + 60 * (hours + 24 * days))


def read_config(text: str) -> dict[str, str]:
    """Returns the settings in the output of `scontrol show config`, including those of cgroup.conf."""
    return {name: value.strip() for name, value in re.findall(r"(?m)^(\S+)[ \t]*= ?(.*)$", text)}


def read_pairs(text: str) -> dict[str, str]:
    """Returns the NAME=VALUE pairs in the output of `scontrol --oneliner show job` or `partition`."""
    return dict(re.findall(r"(\S+?)=(\S*)", text))
