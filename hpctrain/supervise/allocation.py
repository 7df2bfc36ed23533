"""The nodes that a run may use: those of the Slurm allocation, or this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import LaunchError
from hpctrain.resilience import job_to_ask_about

# A controller that is busy or failing over must not hold up a restart for longer.
_QUERY_TIMEOUT_S = 10.0
_USUAL_SLURMD_PORT = 6818


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """job: the Slurm job, as scontrol names it (`12`, or `12_3` for task 3 of an array), or a name for this process
    outside Slurm. number: 0, then 1 after a requeue. nodes: by name, in Slurm's order. addresses: of each node that
    could be resolved. time_limit: when Slurm ends the allocation (epoch); None: unknown or never."""

    job: str
    number: int
    nodes: tuple[str, ...]
    in_slurm: bool
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slurmd_port: int = _USUAL_SLURMD_PORT
    time_limit: float | None = None


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Returns the allocation that this process is in; outside Slurm, this machine. Asks the controller once.

    Raises LaunchError if the node list cannot be read, or if the job is heterogeneous.
    """
    job = job_to_ask_about(environ)
    if job is None:
        host = socket.gethostname()
        return Allocation(job=f"local-{host}-{os.getpid()}", number=0, nodes=(host,), in_slurm=False)
    components = environ.get("SLURM_HET_SIZE", "")
    if components.isdigit() and int(components) > 1:
        raise LaunchError(
            f"the Slurm job {job} is heterogeneous, with {components} components, and srun would start ranks on the "
            "nodes of the first one only: submit a job of one component, or start the ranks without a supervisor, with "
            "srun --het-group=0,1 and so on"
        )
    nodes = expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))
    if not nodes:
        raise LaunchError(
            f"the nodes of the Slurm job {job} are not known (SLURM_JOB_NODELIST is not set, or scontrol failed): call "
            "`hpctrain supervise` in the batch script, or in the shell of salloc"
        )
    facts = read_job(_scontrol("show", "job", "--oneliner", job))
    port = re.search(r"^SlurmdPort\s*=\s*(\d+)", _scontrol("show", "config"), re.MULTILINE)
    return Allocation(
        job=job,
        number=int(environ.get("SLURM_RESTART_COUNT") or 0),
        nodes=nodes,
        in_slurm=True,
        addresses=_addresses(nodes),
        slurmd_port=int(port[1]) if port else _USUAL_SLURMD_PORT,
        time_limit=facts.time_limit,
    )


def nodes_now(allocation: Allocation) -> tuple[str, ...]:
    """Returns the allocation's nodes without those that Slurm has taken out of it since, having noticed their loss.

    If the controller does not answer, all of them are returned.
    """
    if not allocation.in_slurm:
        return allocation.nodes
    left = expand_nodes(read_job(_scontrol("show", "job", "--oneliner", allocation.job)).nodes)
    return tuple(node for node in allocation.nodes if node in left) or allocation.nodes


def was_preempted(allocation: Allocation) -> bool:
    """Returns True if Slurm says that it has preempted the job since it gave the job this allocation.

    Slurm then sends SIGTERM to the ranks without a reason. If the controller does not answer, False is returned.
    """
    return allocation.in_slurm and read_job(_scontrol("show", "job", "--oneliner", allocation.job)).preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """nodes: in Slurm's short form; "" if unknown. time_limit: epoch; None if unknown or never. preempted: in this
    allocation."""

    nodes: str = ""
    time_limit: float | None = None
    preempted: bool = False


def read_job(text: str) -> JobFacts:
    """Reads the output of `scontrol show job --oneliner` with times in seconds since 1970. Pure."""
    nodes = re.search(r"(?<!\S)NodeList=(\S+)", text)
    start, end, preempted = (
        re.search(rf"(?<!\S){name}=(\d+)(?!\S)", text) for name in ("StartTime", "EndTime", "PreemptTime")
    )
    return JobFacts(
        nodes=nodes[1] if nodes and nodes[1] != "(null)" else "",
        time_limit=float(end[1]) if end else None,
        preempted=preempted is not None and (start is None or int(preempted[1]) >= int(start[1])),
    )


def expand_nodes(short: str) -> tuple[str, ...]:
    """Returns the names in Slurm's short form of a list (`hpct[0-3]`); none if scontrol cannot be run."""
    return tuple(_scontrol("show", "hostnames", short).split()) if short else ()


def _addresses(nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the addresses of the nodes by name: by the name, or by what Slurm says (NodeAddr)."""
    found = {node: _resolve(node) for node in nodes}
    unknown = [node for node, addresses in found.items() if not addresses]
    if unknown:
        text = _scontrol("show", "node", "--oneliner", ",".join(unknown))
        for name, address in re.findall(r"^NodeName=(\S+).*?(?<!\S)NodeAddr=(\S+)", text, re.MULTILINE):
            found[name] = _resolve(address)
    return {node: addresses for node, addresses in found.items() if addresses}


def _resolve(name: str) -> tuple[str, ...]:
    try:
        entries: list[Any] = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _scontrol(*words: str) -> str:
    """Output of a scontrol command; "" if it fails or takes longer than _QUERY_TIMEOUT_S."""
    try:
        done = subprocess.run(
            ["scontrol", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
