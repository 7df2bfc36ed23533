"""The nodes of a supervised run: which nodes it may use, and how nodes are checked before a start and watched later."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, final

import psutil

from hpctrain.comm import ProbeTarget, probe_hosts
from hpctrain.errors import LaunchError
from hpctrain.launch import SlurmUnavailable, ask_once
from hpctrain.resilience import job_to_ask_about

# A controller that is busy or failing over must not hold up a restart for longer.
_QUERY_TIMEOUT_S = 10.0
_USUAL_SLURMD_PORT = 6818


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The nodes that a run may use: the nodes of the Slurm allocation, or this machine.

    job: id of the Slurm job as scontrol names it (`12`, or `12_3` for task 3 of an array); outside Slurm, a name for
    this process.
    number: 0 for the first allocation of the job, 1 after the first requeue, and so on.
    nodes: names of the nodes, in Slurm's order.
    in_slurm: False outside Slurm.
    addresses: addresses of each node whose name could be resolved.
    slurmd_port: port of Slurm's daemon on the nodes.
    time_limit: end of the allocation by its time limit, in seconds since 1970; None if unknown or unlimited.
    """

    job: str
    number: int
    nodes: tuple[str, ...]
    in_slurm: bool
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slurmd_port: int = _USUAL_SLURMD_PORT
    time_limit: float | None = None


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Returns the Slurm allocation of this process. Outside Slurm, returns this machine as an allocation of one node.

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
    """Returns the nodes that are still in the allocation. Slurm removes a node when it notices that the node is lost.

    All nodes are returned if the controller does not answer.
    """
    if not allocation.in_slurm:
        return allocation.nodes
    left = expand_nodes(read_job(_scontrol("show", "job", "--oneliner", allocation.job)).nodes)
    return tuple(node for node in allocation.nodes if node in left) or allocation.nodes


def was_preempted(allocation: Allocation) -> bool:
    """Returns True if Slurm reports a preemption of the job in this allocation.

    Slurm must be asked, since the SIGTERM that Slurm sends at a preemption gives no reason. Returns False if the
    controller does not answer.
    """
    return allocation.in_slurm and read_job(_scontrol("show", "job", "--oneliner", allocation.job)).preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What scontrol reports about a job.

    nodes: list of nodes in Slurm's short form; "" if unknown.
    time_limit: end by the time limit, in seconds since 1970; None if unknown or unlimited.
    preempted: True if the job was preempted in this allocation.
    """

    nodes: str = ""
    time_limit: float | None = None
    preempted: bool = False


def read_job(text: str) -> JobFacts:
    """Parses the output of `scontrol show job --oneliner`, which must have its times in seconds since 1970."""
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
    """Returns the node names of a list in Slurm's short form (`hpct[0-3]`); empty if scontrol cannot be run."""
    return tuple(_scontrol("show", "hostnames", short).split()) if short else ()


def _addresses(nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the addresses of the nodes, resolved from the name or from Slurm's NodeAddr."""
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
    """Returns the output of a scontrol command; "" if it fails or takes longer than _QUERY_TIMEOUT_S."""
    try:
        return ask_once(["scontrol", *words], timeout_s=_QUERY_TIMEOUT_S)
    except SlurmUnavailable:
        return ""


# Checks nodes before a start: does the node answer, are its mounts there, has the earlier attempt ended?
#
# `python -m` is not needed on the nodes: what runs there is a short shell script, so that the check itself
# does not load Python from a shared filesystem that may be what is broken.


# Set for all ranks, so that those of an earlier attempt are found on a node and ended.
MARK_VARIABLE = "HPCTRAIN_SUPERVISED"
_PROBE_TIMEOUT_S = 1.5
# srun's own settings for a job's steps, which must not apply to a check with one task per node.
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
    """What is checked on each node before a start.

    mark: value of MARK_VARIABLE in this supervisor's ranks.
    run_directory: directory that must be writable.
    paths: paths that must exist.
    script: the site's own check, which must exit with 0; None if the site has no check.
    timeout_s: seconds within which a node must answer; a node that does not answer in time is not used.
    """

    mark: str
    run_directory: Path
    paths: Sequence[str] = ()
    script: str | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Result of the check of the nodes.

    usable: nodes that passed the check, in Slurm's order.
    unusable: for each other node, why it is not used.
    silent: the nodes of `unusable` that do not answer.
    oom_kills: for each usable node, how many processes the kernel has ended because memory ran out, since the node was
    booted.
    """

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
    """Checks all nodes at the same time. Takes at most `checks.timeout_s` and a few seconds.

    known_silent: nodes that are known not to answer. They are not checked, and are in `silent` of the result.
    """
    silent = [node for node in nodes if node in known_silent]
    unusable = dict.fromkeys(silent, "it does not answer")
    if allocation.in_slurm:
        without = without_slurmd([node for node in nodes if node not in silent], allocation=allocation)
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


def without_slurmd(nodes: Sequence[str], *, allocation: Allocation) -> list[str]:
    """Returns the nodes whose slurmd does not answer, of those whose address is known."""
    targets = [
        ProbeTarget(host=node, addresses=allocation.addresses[node], port=allocation.slurmd_port)
        for node in nodes
        if node in allocation.addresses
    ]
    found = probe_hosts(targets, timeout_s=_PROBE_TIMEOUT_S, answers=(0,))
    return [node for node, answers in found.items() if not answers]


def read_check(text: str) -> dict[str, tuple[str, str]]:
    """Parses the output of the check. Returns, for each node, its verdict `ok` or `bad` and the text after it."""
    return {node: (word, rest.strip()) for node, word, rest in _LINE.findall(text)}


# $1: key of the servers. A server on another node cannot see that the supervisor has ended.
_END_SERVERS = r"""
node=${SLURMD_NODENAME:-$(uname -n)}
for lock in /dev/shm/hpctrain-fork-$(id -u)/"$1"*-"$(uname -n)".lock; do
  server=$(cat "$lock" 2>/dev/null)
  if [ -n "$server" ] && grep -q fork_server/__main__ "/proc/$server/cmdline" 2>/dev/null; then
    kill -KILL "$server"; rm -f "$lock" "${lock%.lock}" "${lock%.lock}.log"
  fi
done
printf 'hpctrain-node %s ok\n' "$node"
"""
_END_SERVERS_WITHIN_S = 5.0


def end_fork_servers(
    key: str, nodes: Sequence[str], *, allocation: Allocation, environ: Mapping[str, str]
) -> None:
    """Ends the fork servers with this key on the nodes. They would wait up to two minutes for another launch."""
    argv = ["sh", "-c", _END_SERVERS, "sh", key]
    _run_on_nodes(argv, nodes, allocation=allocation, environ=environ, timeout_s=_END_SERVERS_WITHIN_S)


def _run_check(
    nodes: Sequence[str], *, allocation: Allocation, checks: Checks, environ: Mapping[str, str]
) -> str:
    argv = ["sh", "-c", _SCRIPT, "sh", f"{MARK_VARIABLE}={checks.mark}", str(checks.run_directory)]
    argv += [checks.script or "", *checks.paths]
    return _run_on_nodes(argv, nodes, allocation=allocation, environ=environ, timeout_s=checks.timeout_s)


def _run_on_nodes(
    argv: list[str],
    nodes: Sequence[str],
    *,
    allocation: Allocation,
    environ: Mapping[str, str],
    timeout_s: float,
) -> str:
    """Runs a command on all nodes. Returns what was printed until all had answered or the time was over."""
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
        return _read_until(child.stdout, num_nodes=len(nodes), timeout_s=timeout_s)
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


# "Discard": on most nodes nothing listens there, and the kernel refuses the connection; what does listen ignores it.
_KERNEL_PORT = 9
_INTERVAL_S = 1.0
_AGAIN_S = 0.2  # after a missing answer
_TIMEOUT_S = 1.2  # a lost packet is sent again after a second
_CONFIRMS_WITHIN_S = 0.4  # of a probe after a missing answer: with its packet three have been lost
# A packet may be lost, so that a single missing answer proves nothing.
_SILENCES = 2


@final
class NodeWatch:
    """Watches the nodes of a running step: probes them every _INTERVAL_S seconds, by two methods.

    The first method asks each node's kernel: a kernel that is alive refuses a connection to a port on which nothing
    listens. A node that has never answered (because of a firewall that drops packets) is not judged by this method. The
    second method looks at srun's connections: on each node, the daemon of the step (slurmstepd) has a connection to
    srun for the ranks' output. If a connection is gone, either the ranks on that node have ended, or all processes of
    the node are gone. In the first case slurmd still answers on the node. slurmd is asked only if a connection is gone,
    since slurmd logs each request.

    Both methods find a lost node long before Slurm reports the loss. srun itself neither ends nor prints anything if
    all processes of a node are killed or the node's link is cut (Slurm 22.05).

    addresses: addresses of each node, by name.

    num_nodes: number of the nodes.
    """

    def __init__(
        self, nodes: Sequence[str], *, addresses: Mapping[str, tuple[str, ...]], slurmd_port: int
    ) -> None:
        self.num_nodes = len(nodes)
        self._addresses = {node: addresses[node] for node in nodes if addresses.get(node)}
        self._slurmd_port = slurmd_port
        self._srun: psutil.Process | None = None
        self._answered: dict[str, float] = {}  # node -> time (epoch) at which its kernel last answered
        self._connected: dict[str, float] = {}  # node -> time at which it was last connected to srun
        self._ended: set[str] = set()  # nodes whose ranks have ended while slurmd lives
        self._silences: dict[tuple[str, str], int] = {}  # node, what was asked -> silences in a row
        self._next_s = 0.0

    def launched(self, pid: int) -> None:
        """Sets the process id of srun."""
        self._srun = psutil.Process(pid)

    def look(self) -> None:
        """Probes the nodes if a probe is due. Takes milliseconds if all nodes answer, and at most twice _TIMEOUT_S."""
        if not self._addresses or time.monotonic() < self._next_s:
            return
        asked = time.time()
        self.note_kernels(self._probe(list(self._addresses), port=_KERNEL_PORT), asked=asked)
        suspects = self.note_connections(self._connected_nodes(), asked=asked)
        if suspects:
            answers = self._probe(suspects, port=self._slurmd_port, outcomes=(0,))
            self.note_daemons(answers)
        silent = any(self._silences.values())
        self._next_s = time.monotonic() + (_AGAIN_S if silent else _INTERVAL_S)

    def lost(self) -> dict[str, float]:
        """Returns the lost nodes, each with the time of its last answer or connection, in seconds since 1970."""
        return {
            node: (self._answered if what == "kernel" else self._connected)[node]
            for (node, what), count in self._silences.items()
            if count >= _SILENCES
        }

    def note_kernels(self, answers: Mapping[str, bool], *, asked: float) -> None:
        """Records whether each node's kernel answered a probe made at the time `asked` (seconds since 1970)."""
        for node, answered in answers.items():
            if answered:
                self._answered[node] = asked
            if node in self._answered:
                self._count(node, "kernel", answered=answered)

    def note_connections(self, connected: Sequence[str], *, asked: float) -> list[str]:
        """Records that the nodes in `connected` were connected to srun at the time `asked` (seconds since 1970).

        Returns the nodes that were connected before and are no longer connected, except nodes whose ranks are known to
        have ended.
        """
        for node in connected:
            self._connected[node] = asked
            self._count(node, "daemon", answered=True)
        return [node for node in self._connected if node not in connected and node not in self._ended]

    def note_daemons(self, answers: Mapping[str, bool]) -> None:
        """Records whether slurmd answers on nodes that are no longer connected to srun."""
        for node, answered in answers.items():
            self._count(node, "daemon", answered=answered)
            if answered:
                self._ended.add(node)

    def _count(self, node: str, what: str, *, answered: bool) -> None:
        self._silences[node, what] = 0 if answered else self._silences.get((node, what), 0) + 1

    def _probe(
        self, nodes: Sequence[str], *, port: int, outcomes: Sequence[int] | None = None
    ) -> dict[str, bool]:
        targets = [ProbeTarget(host=node, addresses=self._addresses[node], port=port) for node in nodes]
        timeout_s = _CONFIRMS_WITHIN_S if any(self._silences.values()) else _TIMEOUT_S
        if outcomes is None:
            return probe_hosts(targets, timeout_s=timeout_s)
        return probe_hosts(targets, timeout_s=timeout_s, answers=outcomes)

    def _connected_nodes(self) -> list[str]:
        if self._srun is None:
            return []
        try:
            connections = self._srun.net_connections(kind="tcp")
        except psutil.Error:  # srun has just ended
            return list(self._connected)
        peers = {
            connection.raddr.ip.removeprefix("::ffff:")
            for connection in connections
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr
        }
        return [node for node, addresses in self._addresses.items() if peers & {*addresses}]
