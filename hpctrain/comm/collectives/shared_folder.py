"""Creation of a folder that all ranks use, by one rank."""

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
    """Makes `directory` and its parents, unless they exist. Collective.

    Raises LaunchError on all ranks if it cannot be made, or if a rank does not see it within `VISIBLE_WITHIN_S`.
    Only one rank makes it: made by all at once on a dispersed GlusterFS volume that lacks a server, its servers keep
    the folders of different nodes, and every file in it fails with "stale file handle" for ever.
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
    """Returns True if `path`, made by another rank, is visible here within `VISIBLE_WITHIN_S`. May raise OSError."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not _is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError, StopIteration):  # queries the server instead of the attribute cache
            os.listdir(next(above for above in path.parents if above.exists()))
    return True


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ESTALE:  # handle of a deleted predecessor
            return False
        raise
