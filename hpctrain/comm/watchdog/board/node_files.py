"""Files in which ranks say where they are: each rank's for its node, and one of each node for all.

A rank that hangs outside any collective cannot report it. A rank that makes no progress therefore writes its position
into a folder that only the ranks of its node see, in the node's memory or on its disk; one of them, the leader, gathers
these in one file in the run directory, and waiting ranks read which others have not reached their operation. Nothing
here communicates.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.comm.watchdog.board.processes import Activity
from hpctrain.comm.watchdog.board.rank_status import GroupPosition, Placement, RankPosition
from hpctrain.storage import replace_file

T = TypeVar("T")

# Nodes whose files are in one directory.
_NODES_PER_DIRECTORY = 256
# So many files of nodes are read at a time, since each may take a millisecond or more on a shared filesystem.
_READERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFolders:
    """Where one rank writes. shared: in the run directory, of all ranks. local: of the ranks of its node."""

    rank: int
    shared: Path
    local: Path
    placement: Placement

    @property
    def node(self) -> int:
        return self.placement.node_of_rank[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """Contents of one node's file.

    written: seconds since the epoch, by that node's clock, as in its ranks' positions. addresses, port: where its host
    can be probed (`hpctrain.comm.watchdog.host_probe`); port None: nowhere. reached: for each other host, whether it
    answered the last probe of any of the ranks.
    """

    node: int
    host: str
    written: float
    addresses: tuple[str, ...] = ()
    port: int | None = None
    reached: Mapping[str, bool] = field(default_factory=dict)
    positions: Mapping[int, RankPosition] = field(default_factory=dict)


# ---- files of ranks, in the folder of their node


def position_path(local: Path, *, rank: int) -> Path:
    return local / f"rank-{rank}.json"


def calls_path(directory: Path) -> Path:
    """Folder of the files of `call_path`."""
    return directory / "called"


def call_path(directory: Path, *, rank: int) -> Path:
    """File that exists when other ranks have waited long for `rank`, which then prints its stacks."""
    return calls_path(directory) / f"{rank}"


def call(directory: Path, *, rank: int) -> None:
    """Asks `rank` for its stacks. Raises OSError."""
    calls_path(directory).mkdir(exist_ok=True)
    call_path(directory, rank=rank).touch()


def alarm_path(directory: Path) -> Path:
    """File that is touched when an operation is late: every rank then probes the other hosts."""
    return directory / "late"


def time_of(path: Path, *, since: float = 0.0) -> float | None:
    """Returns when a file was written (epoch); None if it does not exist, or was written before `since`."""
    try:
        time_s = path.stat().st_mtime
    except OSError:
        return None
    return time_s if time_s >= since else None


def write_position(position: RankPosition, *, local: Path) -> None:
    """Replaces this rank's file atomically, so that no rank reads half of it. Raises OSError."""
    path = position_path(local, rank=position.rank)
    replace_file(path, json.dumps(asdict(position)).encode(), partial=path.with_suffix(".partial"))


def read_local(local: Path) -> dict[int, RankPosition]:
    """Returns the positions that the ranks of this node have written, by rank."""
    found = {}
    for path in local.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            position = _position(json.loads(path.read_text()))
            found[position.rank] = position
    return found


def _position(fields: dict[str, Any]) -> RankPosition:
    """Raises KeyError, TypeError or AttributeError for fields that are no position's."""
    groups = {name: GroupPosition(**values) for name, values in fields.pop("groups").items()}
    activity = fields.pop("activity", None)
    return RankPosition(**fields, groups=groups, activity=None if activity is None else Activity(**activity))


# ---- files of nodes, on the shared filesystem


def node_path(shared: Path, *, node: int) -> Path:
    first = node - node % _NODES_PER_DIRECTORY
    return shared / f"nodes-{first}" / f"node-{node}.json"


def make_node_folders(shared: Path, *, num_nodes: int) -> None:
    """Makes the folders of all nodes' files. Raises OSError.

    One rank calls it: where several nodes make the same folder at once, GlusterFS answers some of them with ESTALE.
    """
    for node in range(0, num_nodes, _NODES_PER_DIRECTORY):
        node_path(shared, node=node).parent.mkdir(exist_ok=True)


def status_of_node(
    positions: Mapping[int, RankPosition],
    *,
    node: int,
    host: str,
    now: float,
    probed_within_s: float,
    addresses: Sequence[str] = (),
    port: int | None = None,
) -> NodeStatus:
    """Returns what the positions of a node's ranks say together. probed_within_s: older findings do not count."""
    reached: dict[str, bool] = {}
    for position in positions.values():
        if now - position.written <= probed_within_s:
            for other, answered in position.reached.items():
                reached[other] = reached.get(other, False) or answered
    alone = {rank: replace(position, reached={}) for rank, position in positions.items()}
    return NodeStatus(
        node=node, host=host, written=now, addresses=tuple(addresses), port=port, reached=reached, positions=alone
    )  # fmt: skip


def write_node(status: NodeStatus, *, shared: Path, rank: int) -> None:
    """Replaces a node's file. rank: the writing one, since for a moment two ranks may lead. Raises OSError."""
    positions = [asdict(found) for found in status.positions.values()]
    fields = {**asdict(replace(status, positions={})), "positions": positions}
    path = node_path(shared, node=status.node)
    partial, content = path.with_name(f"{path.stem}-{rank}.partial"), json.dumps(fields).encode()
    replace_file(path, content, partial=partial)


def read_node(shared: Path, *, node: int, since: float = 0.0) -> NodeStatus | None:
    """Returns a node's status; None if its file is missing, unreadable or older than `since` (epoch), that is, from
    an earlier attempt of the run."""
    try:
        fields = json.loads(node_path(shared, node=node).read_text())
        positions = [_position(entry) for entry in fields.pop("positions")]
        by_rank = {found.rank: found for found in positions if found.written >= since}
        status = NodeStatus(**{**fields, "addresses": tuple(fields["addresses"]), "positions": by_rank})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return status if status.written >= since else None


def read_nodes(
    shared: Path, *, nodes: Sequence[int], since: float, within_s: float
) -> tuple[list[NodeStatus], list[int]]:
    """Returns the statuses of `nodes` that have written one, and the nodes whose file could not be read in time."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for node in nodes:
        left.put(node)
    found: dict[int, NodeStatus | None] = {}

    def read() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                node = left.get_nowait()
                found[node] = read_node(shared, node=node, since=since)

    # Daemons: a file on a server that is gone is read for ever.
    threads = [threading.Thread(target=read, daemon=True) for _ in range(min(_READERS, len(nodes)))]
    until = time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    read_now = dict(found)
    statuses = [status for _, status in sorted(read_now.items()) if status is not None]
    return statuses, [node for node in nodes if node not in read_now]


# ---- files that may hang


def quietly(function: Callable[[], object]) -> None:
    """Runs `function`; an OSError is ignored."""
    with contextlib.suppress(OSError):
        function()


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Runs `function` in another thread and returns its result; None if it raises OSError or takes longer."""
    found: list[T] = []
    thread = threading.Thread(
        target=quietly, args=(lambda: found.append(function()),), name="hpctrain-files", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
