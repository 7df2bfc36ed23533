"""The folder of one node's ranks, in the node's memory or on its disk. The last rank that leaves removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import final

from hpctrain.comm.interface.remote_memory import SHARED_MEMORY

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
