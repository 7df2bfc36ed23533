"""munged, slurmctld and the slurmds: started in their places, and waited for."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from pathlib import Path

from tests.cluster.namespaces import enter
from tests.cluster.plan import HEAD, ClusterPlan
from tests.cluster.record import ClusterError, Record
from tests.cluster.requirements import search_path

_READY_TIMEOUT_S = 300.0
_TAIL_LINES = 15


def start_daemons(plan: ClusterPlan, record: Record) -> None:
    """Start all of them; they are at work when this returns, and every node is idle.

    Raises ClusterError with the last lines of the log that tells why.
    """
    key = plan.directory / "munge" / "key"
    with open(key, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_bytes(128))
    log = plan.directory / "log"
    munged = [
        "munged", "--force", f"--socket={plan.munge_socket}", f"--key-file={key}", f"--log-file={log}/munged.log",
        f"--pid-file={plan.directory}/pid/munged", f"--seed-file={plan.directory}/munge/seed", "--num-threads=4",
    ]  # fmt: skip
    start_daemon(plan, record, place=HEAD, command=munged, log=log / "munged.log")
    start_daemon(plan, record, place=HEAD, command=["slurmctld"], log=log / "slurmctld.log")
    for node in plan.node_names:
        start_slurmd(plan, record, node=node)
    _wait_until_idle(plan, record)


def start_slurmd(plan: ClusterPlan, record: Record, *, node: str) -> None:
    command = ["slurmd", "-N", node]
    start_daemon(plan, record, place=node, command=command, log=plan.directory / "log" / f"slurmd-{node}.log")


def daemon_environment(plan: ClusterPlan) -> dict[str, str]:
    return {"PATH": search_path(), "LANG": "C.UTF-8", "SLURM_CONF": str(plan.slurm_conf_path)}


def start_daemon(plan: ClusterPlan, record: Record, *, place: str, command: list[str], log: Path) -> None:
    """Start a daemon that goes to the background by itself: the place's first process takes it in.

    Raises ClusterError with the last lines of `log` when it does not start.
    """
    words = plan.directory / "log" / f"{command[0]}-{place}.start"
    with words.open("wb") as output:  # not a pipe: the daemon may keep it open
        done = subprocess.run(
            [*enter(record.places[place]), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
            env=daemon_environment(plan), timeout=300, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise ClusterError(
            f"{command[0]} on {place} ended with {done.returncode}:\n{_tail(words)}\n{_tail(log)}"
        )


def _wait_until_idle(plan: ClusterPlan, record: Record) -> None:
    asked = [*enter(record.places[HEAD]), "sinfo", "--noheader", "--Node", "--format=%N %T"]
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while True:
        done = subprocess.run(
            asked, capture_output=True, text=True, check=False, env=daemon_environment(plan), cwd="/"
        )
        states = dict(line.split() for line in done.stdout.splitlines() if line.strip())
        if done.returncode == 0 and states == dict.fromkeys(plan.node_names, "idle"):
            return
        if time.monotonic() > deadline_s:
            late = [node for node in plan.node_names if states.get(node) != "idle"]
            log = plan.directory / "log" / (f"slurmd-{late[0]}.log" if states else "slurmctld.log")
            raise ClusterError(
                f"after {_READY_TIMEOUT_S:.0f} s the nodes are {states or done.stderr.strip()}:\n{_tail(log)}"
            )
        time.sleep(0.1)


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    except FileNotFoundError:
        return ""
