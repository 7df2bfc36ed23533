"""A FUSE filesystem that passes everything on to a folder and counts the operations, by rank and part of the run.

Run as `python -m benchmarks.growth.counting_filesystem FOLDER MOUNT_POINT`. The kernel keeps the attributes of files,
as clients of NFS and Lustre do; otherwise each read would ask for the size first. It keeps no names, so every look-up
of every component of a path is counted: more than such a client sends to its server.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import mfusepy  # type: ignore[import-untyped]

from tests.faults.checkpoint.faulty_filesystem import Control, Passthrough, Served, unmount

METADATA = (
    "access", "getattr", "open", "create", "opendir", "readdir", "readlink", "statfs", "truncate", "fallocate", "fsync",
    "fsyncdir", "rename", "unlink", "mkdir", "rmdir", "chmod", "chown", "utimens",
)  # fmt: skip
CONTENT = ("read", "write")
REFRESH = (
    "refresh"  # a getattr with which the kernel renews a file's access time after a read: see `Refreshes`
)
NO_RANK = -1
FOLDERS = "folders"


@functools.lru_cache(maxsize=65536)
def rank_of(thread: int) -> int:
    """Returns the rank of a thread of a process that mpirun started; NO_RANK for others."""
    try:
        with open(f"/proc/{thread}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return NO_RANK
    found = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"OMPI_COMM_WORLD_RANK=")]
    return int(found[0]) if found else NO_RANK


def area_of(path: str) -> str:
    """Returns the part of the run that a path belongs to: `data`, `run`, `run/metrics`, ...

    FOLDERS: the folders of data and run themselves, which are looked up with every file in them.
    """
    parts = path.strip("/").split("/")
    if len(parts) == 1:
        return FOLDERS
    if parts[0] == "run" and parts[1] in ("checkpoints", "metrics", "watch", "save-now"):
        return f"run/{parts[1]}"
    return parts[0]


class Refreshes:
    """Tells the kernel's requests for the attributes of an open file from look-ups of its name: both are `getattr`.

    A read invalidates the access time, so the next `fstat` of that file, by any process, becomes a request. A look-up
    follows one of its folder by the same thread, since no names are kept.
    """

    def __init__(self) -> None:
        self._read: set[str] = set()  # files that were read since the last request for their attributes
        self._before: dict[int, str] = {}  # path of a thread's last `getattr`

    def kind(self, name: str, path: str, *, thread: int) -> str:
        """Returns REFRESH for a `getattr` of an open file after a read, else the operation's name."""
        if name == "read":
            self._read.add(path)
        if name != "getattr":
            return name
        follows_folder = self._before.get(thread) == os.path.dirname(path)
        self._before[thread] = path
        if path not in self._read:
            return name
        self._read.discard(path)
        return name if follows_folder else REFRESH


def _counted(name: str) -> Callable[..., Any]:
    method = getattr(Passthrough, name)

    @functools.wraps(method)
    def counted(self: Counting, *arguments: Any) -> Any:
        path = arguments[0]
        if path is None:  # of an open file: the handle is the last argument
            path = self.paths.get(arguments[-1], "") if arguments else ""
        _, _, thread = mfusepy.fuse_get_context()
        kind = self.refreshes.kind(name, path, thread=thread)
        self.counts[rank_of(thread), area_of(path), kind] += 1
        return method(self, *arguments)

    return counted


class Counting(Passthrough):
    """A passthrough filesystem that counts operations. counts: number of operations by (rank, area, operation)."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.counts: Counter[tuple[int, str, str]] = Counter()
        self.refreshes = Refreshes()


for _name in (*METADATA, *CONTENT):
    setattr(Counting, _name, _counted(_name))


def _answer(filesystem: Counting, mount_point: str) -> None:
    for _ in sys.stdin:
        print(json.dumps([[*key, count] for key, count in list(filesystem.counts.items())]), flush=True)
    unmount(mount_point)
    os._exit(0)


def main(folder: str, mount_point: str) -> None:
    filesystem = Counting(Control(root=os.path.realpath(folder)))
    threading.Thread(target=_answer, args=(filesystem, mount_point), daemon=True).start()
    Served(
        filesystem, mount_point, foreground=True, nothreads=True, attr_timeout=3600, entry_timeout=0,
        negative_timeout=0, hard_remove=True, fsname="hpctrain-counting",
    )  # fmt: skip
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
