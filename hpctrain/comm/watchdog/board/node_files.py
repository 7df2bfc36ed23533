"""The files in which ranks state what they are doing: one per rank for its own node, and one per node for all ranks.

A rank that hangs outside any collective cannot report it. So a rank that makes no progress writes its position into a
folder that only the ranks of its node see, in the node's memory or on its disk. One of these ranks, the leader, copies
the positions into one file in the run directory. There a waiting rank reads which ranks have not started the operation
that it waits in. An announcement file tells all ranks that the run ends. Nothing here communicates.
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
from hpctrain.comm.watchdog.board.rank_status import Activity, GroupPosition, RankNodes, RankPosition
from hpctrain.storage import replace_file

T = TypeVar("T")

# Nodes whose files are in one directory.
_NODES_PER_DIRECTORY = 256
# Number of nodes' files that are read at a time, since each may take a millisecond or more on a shared filesystem.
_READERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFolders:
    """The folders in which one rank states what it is doing.

    shared: folder of all ranks, in the run directory.
    local: folder of the ranks of this node.
    placement: the node of each rank of the run.
    """

    rank: int
    shared: Path
    local: Path
    placement: RankNodes

    @property
    def node(self) -> int:
        return self.placement.node_of_rank[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """Contents of the file that one node writes for all other nodes.

    written: when the file was written, in seconds since 1970 by the clock of that node. The positions use this clock.
    addresses, port: where other hosts can probe the node's host (`hpctrain.comm.watchdog.host_probe`). `port` is None
    if the host cannot be probed.
    reached: for each other host, True if it answered the last probe of at least one rank of the node.
    positions: what each rank of the node is doing.
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
    """Returns the folder of the files that ask ranks to print their stacks (see `call_path`)."""
    return directory / "called"


def call_path(directory: Path, *, rank: int) -> Path:
    """Returns the path of the file that asks `rank` to print its stacks, because other ranks have waited for it."""
    return calls_path(directory) / f"{rank}"


def call(directory: Path, *, rank: int) -> None:
    """Asks `rank` to print its stacks. Raises OSError."""
    calls_path(directory).mkdir(exist_ok=True)
    call_path(directory, rank=rank).touch()


def alarm_path(directory: Path) -> Path:
    """Returns the path of the file that is touched when an operation is late: every rank then probes other hosts."""
    return directory / "late"


def time_of(path: Path, *, since: float = 0.0) -> float | None:
    """Returns the time when a file was written, in seconds since 1970.

    Returns None if the file does not exist or is older than `since`.
    """
    try:
        time_s = path.stat().st_mtime
    except OSError:
        return None
    return time_s if time_s >= since else None


def write_position(position: RankPosition, *, local: Path) -> None:
    """Replaces the file with this rank's position atomically: no rank reads a half-written file. Raises OSError."""
    path = position_path(local, rank=position.rank)
    replace_file(path, json.dumps(asdict(position)).encode(), partial=path.with_suffix(".partial"))


def read_local(local: Path) -> dict[int, RankPosition]:
    """Returns what the ranks of this node have written about what they do (their positions), by rank."""
    found = {}
    for path in local.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            position = _position(json.loads(path.read_text()))
            found[position.rank] = position
    return found


def _position(fields: dict[str, Any]) -> RankPosition:
    """Builds a rank's position (what the rank is doing) from the JSON fields of its file.

    Raises KeyError, TypeError or AttributeError for wrong fields.
    """
    groups = {name: GroupPosition(**values) for name, values in fields.pop("groups").items()}
    activity = fields.pop("activity", None)
    return RankPosition(**fields, groups=groups, activity=None if activity is None else Activity(**activity))


# ---- files of nodes, on the shared filesystem


def node_path(shared: Path, *, node: int) -> Path:
    first = node - node % _NODES_PER_DIRECTORY
    return shared / f"nodes-{first}" / f"node-{node}.json"


def make_node_folders(shared: Path, *, num_nodes: int) -> None:
    """Creates the folders of all nodes' files. Raises OSError.

    Only one rank may call this: if several nodes create the same folder at once, GlusterFS answers some nodes with
    ESTALE.
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
    """Combines the positions of a node's ranks (what each rank is doing) into the contents of the node's file.

    probed_within_s: results of probes of other hosts are used only from positions up to this age in seconds.
    """
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
    """Replaces the file of a node by one that contains `status`. Raises OSError.

    rank: the rank that writes. This number is part of the temporary file's name, since for a moment two ranks may be
    leaders.
    """
    positions = [asdict(found) for found in status.positions.values()]
    fields = {**asdict(replace(status, positions={})), "positions": positions}
    path = node_path(shared, node=status.node)
    partial, content = path.with_name(f"{path.stem}-{rank}.partial"), json.dumps(fields).encode()
    replace_file(path, content, partial=partial)


def read_node(shared: Path, *, node: int, since: float = 0.0) -> NodeStatus | None:
    """Returns a node's status; None if the node's file is missing, unreadable or older than `since`.

    since: start of this attempt, in seconds since 1970; older files belong to an earlier attempt of the run.
    """
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
    """Reads the files of `nodes` in parallel.

    Returns the status of each node that has written its file, and the indices of the nodes whose file could not be
    read within `within_s` seconds.
    """
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for node in nodes:
        left.put(node)
    found: dict[int, NodeStatus | None] = {}

    def read() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                node = left.get_nowait()
                found[node] = read_node(shared, node=node, since=since)

    # Daemon threads, because reading a file on a server that is gone never ends.
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
    """Runs `function` and ignores an OSError."""
    with contextlib.suppress(OSError):
        function()


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Runs `function` in another thread and returns its result.

    Returns None if the function raises OSError or takes longer than `seconds`.
    """
    found: list[T] = []
    thread = threading.Thread(
        target=quietly, args=(lambda: found.append(function()),), name="hpctrain-files", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


_PREFIX = "hpctrain-watch-"
# Seconds. A younger folder may be one that its leader has just created, and not opened yet.
_ABANDONED_AFTER_S = 60.0


def local_parent() -> Path:
    """Returns the directory of this node in which its ranks' folder is created: /dev/shm, or the temporary directory.

    Raises OSError if neither is writable.
    """
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def node_identity(directory: Path) -> str:
    """Returns a text that is equal for ranks of a node that see the same directory and processes.

    This is so for ranks in one container, for example.
    """
    found = directory.stat()
    processes = ""
    with contextlib.suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    return f"{found.st_dev}:{found.st_ino}:{processes}"


def local_folder(parent: Path, *, run: str, leader: int) -> Path:
    """Returns the path of a node's folder.

    run: text that is unique to this run.
    leader: lowest rank of the node.
    """
    return parent / f"{_PREFIX}{run}-{leader}"


def make_local_folder(path: Path) -> LocalFolder:
    """Creates a node's folder and returns this rank's hold on it. Raises OSError.

    First removes the folders that earlier runs have left on this node because their ranks were killed.
    """
    for other in path.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            if time.time() > other.stat().st_mtime + _ABANDONED_AFTER_S:
                LocalFolder(other).release()
    path.mkdir(mode=0o700)
    return LocalFolder(path)


@final
class LocalFolder:
    """A rank's hold on the folder of its node: no process removes a folder that a rank holds.

    The last rank that releases its hold removes the folder. The hold is a shared lock, which ends with the process.
    Ranks that are killed leave the folder behind; `make_local_folder` of a later run on the same node removes it. The
    constructor raises OSError if the folder cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks: then no process removes it
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """Ends the hold, and removes the folder if no other rank holds it."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._fd)
        self._fd = None


# Seconds that the other ranks of a node wait for the one that asks whether the end has been announced.
_ANOTHER_ASKS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Announcement by `rank` that the run ends: all ranks print their reports, and exit at `leave_at`.

    Times are in seconds since 1970.
    """

    rank: int
    host: str
    written: float  # epoch
    leave_at: float
    reason: str


def ending_path(directory: Path) -> Path:
    """Returns the path of the file that contains the announcement that the run ends; see `Ending`."""
    return directory / "ending.json"


def reported_path(directory: Path) -> Path:
    """Returns the path of the file that exists once the announcing rank has printed the report for all ranks."""
    return directory / "reported"


def take_over_path(directory: Path) -> Path:
    """Returns the path of the file that a rank creates when it reports because the announcing rank has not reported."""
    return directory / "taken-over"


def create_exclusively(path: Path) -> bool:
    """Creates an empty file; returns False if it exists. Of several callers, exactly one gets True. Raises OSError."""
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    return True


def announce_ending(ending: Ending, *, directory: Path) -> Ending:
    """Publishes the announcement `ending`, unless another rank has published one before. Raises OSError.

    Returns the announcement that was published first.
    """
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
    """Announces the end of the run, and returns the announcement that was published first. Raises OSError.

    One rank per node writes to the folder `shared`; the other ranks of the node wait until the published announcement
    is in the folder `local`. So C nodes create at most C files in `shared`, whatever the number of ranks.

    after_s: seconds to wait first for another node's announcement, which the leader copies to `local`.
    """
    found = wait_for_ending(local, within_s=after_s)
    if found is None and not create_exclusively(local / "announcing"):
        found = wait_for_ending(local, within_s=_ANOTHER_ASKS_S)
    if found is None:  # also if the rank that asks does not come back
        found = announce_ending(ending, directory=shared)
        announce_ending(found, directory=local)
    return found


def _announce_without_link(text: str, *, directory: Path) -> Ending | None:
    """Announces the end of the run like `announce_ending`, on filesystems without hard links.

    Returns the announcement that was published first; None if its file stays empty. For a moment the file exists and is
    empty.

    text: the announcement as JSON.
    """
    with contextlib.suppress(FileExistsError), ending_path(directory).open("x") as file:
        file.write(text)
    return wait_for_ending(directory, within_s=1.0)


def wait_for_ending(directory: Path, *, within_s: float, since: float = 0.0) -> Ending | None:
    """Waits for the announcement that the run ends, and returns it; None if there is none within `within_s` seconds.

    since: time in seconds since 1970; an older announcement is ignored.
    """
    until = time.monotonic() + within_s
    while (found := read_ending(directory, since=since)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return found


def read_ending(directory: Path, *, since: float = 0.0) -> Ending | None:
    """Returns the announcement that the run ends; None if there is none that is as new as `since`.

    since: time in seconds since 1970.
    """
    try:
        ending = Ending(**json.loads(ending_path(directory).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return ending if ending.written >= since else None


def forget_endings(directory: Path, *, since: float) -> None:
    """Removes an announcement of the run's end that was made before `since`, as it would prevent a new announcement.

    Raises OSError.

    since: time in seconds since 1970.
    """
    if read_ending(directory, since=since) is None:
        for path in (ending_path, reported_path, take_over_path):
            path(directory).unlink(missing_ok=True)
