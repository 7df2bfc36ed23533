"""Checks nodes before a start: does the node answer, are its mounts there, has the earlier attempt ended?

`python -m` is not needed on the nodes: what runs there is a short shell script, so that the check itself does not load
Python from a shared filesystem that may be what is broken.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hpctrain.comm import ProbeTarget, probe_hosts
from hpctrain.supervise.allocation import Allocation

# Set for all ranks, so that those of an earlier attempt are found on a node and ended.
MARK_VARIABLE = "HPCTRAIN_SUPERVISED"
_PROBE_TIMEOUT_S = 1.5
# srun's own settings for a job's steps, which a check of one task a node is not to follow.
_JOB_SETTINGS = (
    "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_DISTRIBUTION",
    "SLURM_GPUS_PER_TASK", "SLURM_GPUS",
)  # fmt: skip

# $1: MARK_VARIABLE=value of the ranks. $2: run directory. $3: the site's check, or "". Others: paths that must exist.
_SCRIPT = r"""
mark=$1; directory=$2; check=$3; shift 3
node=${SLURMD_NODENAME:-$(uname -n)}
say() { printf 'hpctrain-node %s %s\n' "$node" "$*"; exit 0; }
tries=0
while :; do
  left=$(grep -laF "$mark" /proc/[0-9]*/environ 2>/dev/null | sed 's|/proc/||; s|/environ||')
  [ -n "$left" ] || break
  [ $tries -lt 40 ] || say bad "processes of an earlier attempt do not end:" $left
  kill -KILL $left 2>/dev/null
  tries=$((tries + 1)); sleep 0.1
done
[ -w "$directory" ] || say bad "the run directory $directory cannot be written"
for path; do [ -e "$path" ] || say bad "$path is not there"; done
if [ -n "$check" ]; then
  printed=$("$check" 2>&1) || say bad "$check ended with $?: $(printf '%s' "$printed" | tail -n 1)"
fi
say ok $(sed -n 's/^oom_kill //p' /proc/vmstat)
"""
_LINE = re.compile(r"^hpctrain-node (\S+) (ok|bad) ?(.*)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What is checked on each node. mark: value of MARK_VARIABLE in this supervisor's ranks. script: of the site; it
    must end with 0. timeout_s: a node that has not answered until then is not used."""

    mark: str
    run_directory: Path
    paths: Sequence[str] = ()
    script: str | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """usable: nodes that passed, in Slurm's order. unusable: why each of the others is not used. silent: those of
    them that do not answer. oom_kills: processes that the kernel of a node has ended for want of memory since it was
    started."""

    usable: tuple[str, ...]
    unusable: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    oom_kills: Mapping[str, int] = field(default_factory=dict)


def survey_nodes(
    nodes: Sequence[str],
    *,
    allocation: Allocation,
    checks: Checks,
    environ: Mapping[str, str],
    known_silent: Sequence[str] = (),
) -> Survey:
    """Checks the nodes, all at once. Takes no longer than `checks.timeout_s` and a few seconds.

    known_silent: nodes that have just been found not to answer; they are not asked.
    """
    silent = [node for node in nodes if node in known_silent]
    unusable = dict.fromkeys(silent, "it does not answer")
    if allocation.in_slurm:
        without = _without_slurmd([node for node in nodes if node not in silent], allocation=allocation)
        unusable |= dict.fromkeys(without, "slurmd does not answer there")
        silent += without
    # srun would wait for a node without slurmd, and then start nothing on the others.
    asked = [node for node in nodes if node not in unusable]
    text = _run_check(asked, allocation=allocation, checks=checks, environ=environ) if asked else ""
    verdicts, usable, oom_kills = read_check(text), [], {}
    for node in asked:
        if node not in verdicts:
            unusable[node] = f"no answer to the check within {checks.timeout_s:g} s"
            silent += (
                [node] if verdicts else []
            )  # without any answer it may be Slurm's controller that is silent
        elif verdicts[node][0] == "ok":
            usable.append(node)
            oom_kills[node] = int(verdicts[node][1] or 0)
        else:
            unusable[node] = verdicts[node][1]
    return Survey(usable=tuple(usable), unusable=unusable, silent=tuple(silent), oom_kills=oom_kills)


def _without_slurmd(nodes: Sequence[str], *, allocation: Allocation) -> list[str]:
    targets = [
        ProbeTarget(host=node, addresses=allocation.addresses[node], port=allocation.slurmd_port)
        for node in nodes
        if node in allocation.addresses
    ]
    found = probe_hosts(targets, timeout_s=_PROBE_TIMEOUT_S, answers=(0,))
    return [node for node, answers in found.items() if not answers]


def read_check(text: str) -> dict[str, tuple[str, str]]:
    """Returns for each node the verdict, `ok` or `bad`, and what follows it. Pure."""
    return {node: (word, rest.strip()) for node, word, rest in _LINE.findall(text)}


def _run_check(
    nodes: Sequence[str], *, allocation: Allocation, checks: Checks, environ: Mapping[str, str]
) -> str:
    """Runs the script on all nodes; returns what has been printed once all have answered or time is up."""
    argv = ["sh", "-c", _SCRIPT, "sh", f"{MARK_VARIABLE}={checks.mark}", str(checks.run_directory)]
    argv += [checks.script or "", *checks.paths]
    if allocation.in_slurm:
        count = len(nodes)
        srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpus-per-task=1"]
        srun += [
            f"--nodelist={','.join(nodes)}",
            "--overlap",
            "--mpi=none",
            "--kill-on-bad-exit=0",
            "--quiet",
        ]
        argv = [*srun, *argv]
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in environ.items() if name not in _JOB_SETTINGS},
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        return _read_until(child.stdout, num_nodes=len(nodes), timeout_s=checks.timeout_s)
    finally:
        child.stdout.close()
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _read_until(stream: IO[bytes], *, num_nodes: int, timeout_s: float) -> str:
    end = time.monotonic() + timeout_s
    text = b""
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while (left_s := end - time.monotonic()) > 0:
            if not ready.select(left_s):
                continue
            data = os.read(stream.fileno(), 65536)
            text += data
            if not data or len(read_check(text.decode(errors="replace"))) == num_nodes:
                break
    return text.decode(errors="replace")
