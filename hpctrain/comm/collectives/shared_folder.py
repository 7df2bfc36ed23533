"""A folder that all ranks use: one of them makes it."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.comm.collectives.agreement import agreed, on_rank_0
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import LaunchError

# Attribute caches of network filesystems hide a new file for seconds from other nodes.
VISIBLE_WITHIN_S = 20.0


def make_shared_folder(directory: Path, *, comm: Collective) -> None:
    """Make `directory`, and those above it, unless it is there. Collective. Raises LaunchError on all ranks.

    Never by all at once: on a dispersed volume of GlusterFS that lacks a server, its servers then keep the folder
    of different nodes, and every file in it answers "stale file handle" for ever.
    """

    def make() -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def look() -> None:
        if not is_seen(directory):
            raise LaunchError(
                f"the folder {directory.absolute()} that rank 0 made is not visible here after "
                f"{VISIBLE_WITHIN_S:.0f} s: choose one on a filesystem that all nodes share"
            )

    on_rank_0(comm, make)
    agreed(comm, look)


def is_seen(path: Path) -> bool:
    """Whether this rank sees what another one has made, within `VISIBLE_WITHIN_S`. Raises OSError."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not _is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError, StopIteration):  # asks the server again instead of the attribute cache
            os.listdir(next(above for above in path.parents if above.exists()))
    return True


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ESTALE:  # of what was there before
            return False
        raise
