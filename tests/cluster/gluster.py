"""GlusterFS on a cluster: a glusterd on every node, volumes mounted in every place, bricks that can be lost."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.daemons import start_daemon
from tests.cluster.gluster_volume import DAEMON, Volume, pool, probe
from tests.cluster.namespaces import enter, run_all
from tests.cluster.plan import HEAD, ClusterPlan
from tests.cluster.record import ClusterError, Process, Record, processes_in

_READY_TIMEOUT_S = 300.0


def start_gluster(plan: ClusterPlan, record: Record) -> None:
    """Daemons, pool, volumes, mounts; when it returns, every place sees every brick. Raises ClusterError."""
    with ThreadPoolExecutor() as threads:  # each takes a second to go to the background
        for started in [threads.submit(_start_glusterd, plan, record, node) for node in plan.node_names]:
            started.result()
    first = plan.node_names[0]
    on_first = enter(record.places[first])
    run_all(on_first, [probe(node) for node in plan.node_names[1:]])
    for node in plan.node_names:
        # A volume cannot be made before all know all.
        sees_all = functools.partial(_sees_all, plan, record, node)
        _wait(f"{node} to see all nodes of the pool", sees_all)
    for volume in plan.volumes:
        run_all(on_first, [volume.create(plan.directory, node_names=plan.node_names), volume.start()])
    for place in record.places:
        server = first if place == HEAD else place
        mounts = [volume.mount(plan.directory, server=server) for volume in plan.volumes]
        run_all(enter(record.places[place]), mounts)
    for volume in plan.volumes:
        wait_for_bricks(plan, record, volume=volume)


def wait_for_bricks(plan: ClusterPlan, record: Record, *, volume: Volume) -> None:
    """Until every place is connected to every brick of a volume."""
    num_bricks = len(volume.servers(plan.node_names))
    for place in record.places:
        what = f"{place} to reach the {num_bricks} bricks of {volume.value}"
        _wait(what, functools.partial(_reaches, plan, record, volume, place, num_bricks))


def brick_server(record: Record, *, volume: Volume, node: str) -> Process:
    """The process that serves a node's brick of a volume. Raises ClusterError when there is none."""
    for pid in processes_in({record.namespaces[node]}):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if volume.is_served_by(words, node=node):
            return Process.of(pid)
    raise ClusterError(f"no process serves the brick of the volume {volume.value} on {node}")


def start_bricks(plan: ClusterPlan, record: Record, *, volume: Volume) -> None:
    """Start the servers of a volume that have ended, and wait until all places are connected again."""
    run_all(enter(record.places[plan.node_names[0]]), [volume.start(again=True)])
    wait_for_bricks(plan, record, volume=volume)


def _start_glusterd(plan: ClusterPlan, record: Record, node: str) -> None:
    log = plan.gluster_log(node) / "glusterd.log"
    start_daemon(plan, record, place=node, command=DAEMON, log=log)


def _sees_all(plan: ClusterPlan, record: Record, node: str) -> bool:
    return _ask(record, node, pool()).count("Connected") == plan.num_nodes


def _reaches(plan: ClusterPlan, record: Record, volume: Volume, place: str, num_bricks: int) -> bool:
    reported = _ask(record, place, ["sh", "-c", f"cat {volume.connections(plan.directory)}"])
    return reported.splitlines().count("connected = 1") == num_bricks


def _ask(record: Record, place: str, command: Sequence[str]) -> str:
    done = subprocess.run(
        [*enter(record.places[place]), *command], capture_output=True, text=True, check=False, timeout=300
    )
    return done.stdout


def _wait(what: str, done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise ClusterError(f"waited {_READY_TIMEOUT_S:.0f} s for {what}")
        time.sleep(0.05)
