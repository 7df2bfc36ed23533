"""Files in which ranks say where they are: each rank's for its node, and one of each node for all.

A rank that hangs outside any collective cannot report it. A rank that makes no progress therefore writes its position
into a folder that only the ranks of its node see, in the node's memory or on its disk; one of them, the leader, gathers
these in one file in the run directory, and waiting ranks read which others have not reached their operation. Nothing
here communicates.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, final

from hpctrain.comm.interface.remote_memory import SHARED_MEMORY
from hpctrain.comm.watchdog.board.rank_status import Activity, GroupPosition, Placement, RankPosition
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


# The folder of one node's ranks, in the node's memory or on its disk. The last rank that leaves removes it.


_PREFIX = "hpctrain-watch-"
# A folder that is younger may be one that its leader has just made, and not opened.
_ABANDONED_AFTER_S = 60.0


def local_parent() -> Path:
    """Returns the directory of this node in which its ranks' folder is made: in memory, or else the temporary one.

    Raises OSError if neither can be written to.
    """
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def identity_of(directory: Path) -> str:
    """Returns a text that is equal for ranks of one node if they see the same directory and the same processes, as in
    one container."""
    found = directory.stat()
    processes = ""
    with contextlib.suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    return f"{found.st_dev}:{found.st_ino}:{processes}"


def local_folder(parent: Path, *, run: str, leader: int) -> Path:
    """Returns the folder of the node whose lowest rank is `leader`. run: a text that no other run has."""
    return parent / f"{_PREFIX}{run}-{leader}"


def make_local_folder(path: Path) -> LocalFolder:
    """Makes a node's folder, after removing those of runs whose ranks were killed. Returns the rank's hold on it.

    Raises OSError.
    """
    for other in path.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            if time.time() > other.stat().st_mtime + _ABANDONED_AFTER_S:
                LocalFolder(other).leave()
    path.mkdir(mode=0o700)
    return LocalFolder(path)


@final
class LocalFolder:
    """A rank's hold on the folder of its node; the last rank that leaves removes it. Raises OSError.

    The hold is a shared lock, which ends with the process. A rank that is killed removes nothing: `make_local_folder`
    of a later run does, on the same node.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks: then no process removes it
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def leave(self) -> None:
        """Ends the hold, and removes the folder if no other rank has one."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._fd)
        self._fd = None


# The announcement that the run ends, by a file: of several ranks, the first one's counts.


# Time that the other ranks of a node give the one that asks whether the end has been announced.
_ANOTHER_ASKS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Announcement by `rank` that the run ends: the ranks print their reports and exit at `leave_at` (epoch)."""

    rank: int
    host: str
    written: float  # epoch
    leave_at: float
    reason: str


def ending_path(directory: Path) -> Path:
    """File that exists when the run ends: see `Ending`."""
    return directory / "ending.json"


def reported_path(directory: Path) -> Path:
    """File that exists when the announcing rank of many has printed the report for all."""
    return directory / "reported"


def take_over_path(directory: Path) -> Path:
    """File that the rank makes which reports instead of an announcing rank that has not."""
    return directory / "taken-over"


def claim(path: Path) -> bool:
    """Makes an empty file; returns False if it exists: of several callers, one gets True. Raises OSError."""
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    return True


def announce_ending(ending: Ending, *, directory: Path) -> Ending:
    """Publishes `ending` unless another rank was first. Returns the one that was published. Raises OSError."""
    if (found := read_ending(directory)) is not None:
        return found  # of N ranks whose limits end at the same time, few make a file
    text = json.dumps(asdict(ending))
    partial = directory / f"ending-{ending.rank}.partial"
    partial.write_text(text)
    try:
        os.link(partial, ending_path(directory))  # unlike a rename, it replaces nothing
    except FileExistsError:
        return read_ending(directory) or ending
    except OSError:  # some filesystems have no hard links
        return _announce_without_link(text, directory=directory) or ending
    finally:
        partial.unlink(missing_ok=True)
    return ending


def announce_from_node(ending: Ending, *, shared: Path, local: Path, after_s: float = 0.0) -> Ending:
    """As `announce_ending` in `shared`, for which one of a node's ranks asks; the others find the answer in `local`.

    C nodes make at most C files in `shared`, whatever the number of ranks. after_s: waits so long for another node's
    announcement, which the leader brings to `local`. Raises OSError.
    """
    found = wait_for_ending(local, within_s=after_s)
    if found is None and not claim(local / "announcing"):
        found = wait_for_ending(local, within_s=_ANOTHER_ASKS_S)
    if found is None:  # also if the rank that asks does not come back
        found = announce_ending(ending, directory=shared)
        announce_ending(found, directory=local)
    return found


def _announce_without_link(text: str, *, directory: Path) -> Ending | None:
    """As `announce_ending`; for a moment the file is there and empty. Returns None if it stays so."""
    with contextlib.suppress(FileExistsError), ending_path(directory).open("x") as file:
        file.write(text)
    return wait_for_ending(directory, within_s=1.0)


def wait_for_ending(directory: Path, *, within_s: float, since: float = 0.0) -> Ending | None:
    """As `read_ending`, but returns None only after `within_s`."""
    until = time.monotonic() + within_s
    while (found := read_ending(directory, since=since)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return found


def read_ending(directory: Path, *, since: float = 0.0) -> Ending | None:
    """Returns the announcement; None if there is none, or it is older than `since` (epoch)."""
    try:
        ending = Ending(**json.loads(ending_path(directory).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return ending if ending.written >= since else None


def forget_endings(directory: Path, *, since: float) -> None:
    """Removes what an attempt before `since` (epoch) announced, which would prevent a new announcement.

    Raises OSError.
    """
    if read_ending(directory, since=since) is None:
        for path in (ending_path, reported_path, take_over_path):
            path(directory).unlink(missing_ok=True)
