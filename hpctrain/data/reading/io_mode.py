"""How bytes come from files: through memory maps or by reading; and which of them fits a filesystem."""

from __future__ import annotations

import ctypes
import os
from enum import Enum
from pathlib import Path


class IoMode(str, Enum):
    """Of contiguous data, and of the stored bytes of chunks that are decoded here."""

    AUTO = "auto"  # see `choose`
    MAP = (
        "map"  # copy from memory maps: fastest once the pages are mapped; an error of the disk ends the rank
    )
    READ = "read"  # preadv into the batch: no memory beyond it; an error of the disk is a DataError


# f_type of statfs(2): filesystems whose pages come over a network or through a user's process.
_REMOTE_TYPES = {
    0x6969: "nfs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x00C36400: "ceph",
    0x01021997: "9p",
    0x5346414F: "afs",
}


def remote_type(path: Path | str) -> str | None:
    """Name of the network filesystem that holds `path`; None: a local one, or it cannot be told."""
    # os.statvfs leaves f_type out. It is the first word of struct statfs, whose size differs by machine.
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    number = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_long))[0] & 0xFFFFFFFF
    return _REMOTE_TYPES.get(number)


def choose(mode: IoMode, *, directory: Path, file_bytes: int, map_bytes: int) -> IoMode:
    """What AUTO means here: maps on a local filesystem if all files together take at most `map_bytes`.

    Mapping a page costs more than reading it, so maps are for datasets that stay mapped. The pages are the page
    cache's, which the kernel takes back when it needs memory, but they count as the process's.
    """
    if mode is not IoMode.AUTO:
        return mode
    fits = file_bytes <= map_bytes
    return IoMode.MAP if fits and remote_type(directory) is None else IoMode.READ
