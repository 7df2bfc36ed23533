"""Places: the head and the nodes, each a set of namespaces held by one process; and the links between them."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.plan import (
    HEAD,
    ClusterPlan,
    bridge_commands,
    link_commands,
    node_commands,
    place_setup,
    shape_command,
)
from tests.cluster.record import ClusterError, Lifetime, Process, Record, namespace_of
from tests.cluster.requirements import search_path
from tests.ranks_launcher import REPOSITORY

_INIT = Path(__file__).with_name("place_init.py")
_KINDS = ["--net", "--uts", "--mount", "--pid"]
_START_TIMEOUT_S = 120.0
# What runs in a place runs by these, wherever they lie.
_NEEDED = (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))


def enter(process: Process, *, kinds: Sequence[str] = _KINDS) -> list[str]:
    """The words before a command that make it run in the place that `process` holds."""
    return ["nsenter", "--target", str(process.pid), *kinds, "--"]


def run_all(prefix: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
    """Raises ClusterError with the first command that fails."""
    environ = {**os.environ, "PATH": search_path()}
    for command in commands:
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False, env=environ)
        if done.returncode != 0:
            raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """A first process that has reported and waits for an answer."""

    place: str
    process: Process
    connection: socket.socket


@dataclass(kw_only=True)
class Ties:
    """What binds a cluster to the process that made it.

    connection: watched by the head; with Lifetime.OWNER, closing it ends the cluster.
    children: end with the cluster.
    """

    connection: socket.socket | None = None
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def loosen(self) -> None:
        """Once the cluster has ended: leave no open socket and no zombie."""
        if self.connection is not None:
            self.connection.close()
        for child in self.children:
            child.wait()


def make_places(plan: ClusterPlan, record: Record, *, ties: Ties, shared: Sequence[Path] = ()) -> None:
    """Make the head and the nodes, each written into `record` before it may go on.

    shared: what all see under /tmp, beside what any command needs.
    """
    shared = [*_NEEDED, *shared]
    path = plan.directory / "arrivals"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(plan.num_nodes + 1)
        head = _start(plan, listener, [HEAD], inside=None, ties=ties, shared=shared)[0]
        ties.connection = head.connection
        _admit(head, plan, record)
        arrivals = _start(plan, listener, plan.node_names, inside=head.process, ties=ties, shared=shared)
        for node in sorted(arrivals, key=lambda arrival: plan.node_names.index(arrival.place)):
            _admit(node, plan, record)
            node.connection.close()
    path.unlink()


def connect_places(plan: ClusterPlan, record: Record) -> None:
    """The bridge in the head, and a shaped link from it to every node."""
    # Not the process namespace: `ip ... netns PID` shall understand the ids that we know.
    in_head = enter(record.places[HEAD], kinds=["--net"])
    run_all(in_head, bridge_commands(plan))
    for node in plan.node_names:
        process = record.places[node]
        run_all(in_head, link_commands(node=node, pid=process.pid))
        run_all(enter(process, kinds=["--net"]), node_commands(plan, node=node))
        if plan.rate is not None:
            shape_link(record, node=node, rate=plan.rate)


def shape_link(record: Record, *, node: str, rate: str | None) -> None:
    """Limit both directions of a node's link to `rate`, or to nothing."""
    in_head = enter(record.places[HEAD], kinds=["--net"])
    run_all(in_head, [shape_command(device=node, rate=rate)])
    in_node = enter(record.places[node], kinds=["--net"])
    run_all(in_node, [shape_command(device="eth0", rate=rate)])


def _start(
    plan: ClusterPlan,
    listener: socket.socket,
    names: Sequence[str],
    *,
    inside: Process | None,
    ties: Ties,
    shared: Sequence[Path],
) -> list[_Arrival]:
    """Start the first processes of places, and wait until each has reported."""
    outside = [] if inside is None else enter(inside)
    new = [*outside, "unshare", "--fork", *_KINDS, "--mount-proc"]
    started = {}
    for name in names:
        setup = json.dumps(place_setup(plan, place=name, shared=shared))
        log = plan.directory / "log" / f"{name}.log"
        with log.open("wb") as output:
            started[name] = subprocess.Popen(
                [*new, sys.executable, "-I", "-S", str(_INIT), str(plan.directory / "arrivals"), name, setup],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/",
                env={"PATH": search_path(), "LANG": "C.UTF-8"},
            )  # fmt: skip
        ties.children.append(started[name])
    listener.settimeout(0.5)
    arrivals: list[_Arrival] = []
    waited_s = 0.0
    while len(arrivals) < len(names):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            waited_s += 0.5
            failed = [name for name, process in started.items() if process.poll() is not None]
            if failed or waited_s > _START_TIMEOUT_S:
                name = (failed or list(names))[0]
                reported = (plan.directory / "log" / f"{name}.log").read_text().strip()
                raise ClusterError(f"{name} did not come up: {reported or 'no word from it'}") from None
            continue
        arrivals.append(_receive(connection))
    return arrivals


def _receive(connection: socket.socket) -> _Arrival:
    reported = json.loads(connection.recv(65536))
    # The kernel gives the id as we would see it, whatever namespaces lie between.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if reported["report"] != "ready":
        raise ClusterError(f"{reported['place']} cannot be made: {reported['report']}")
    return _Arrival(
        place=reported["place"],
        process=Process.of(struct.unpack("3i", credentials)[0]),
        connection=connection,
    )


def _admit(arrival: _Arrival, plan: ClusterPlan, record: Record) -> None:
    """Write a place down, then let it go on."""
    record.places[arrival.place] = arrival.process
    record.namespaces[arrival.place] = namespace_of(arrival.process.pid, "net")
    record.write(plan.directory)
    tied = arrival.place == HEAD and record.lifetime is Lifetime.OWNER
    arrival.connection.send(b"tied" if tied else b"kept")
