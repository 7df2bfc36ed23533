"""How files are read: through memory maps or with read calls; and the choice for a given filesystem."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from hpctrain.storage import filesystem_of


class IoMode(str, Enum):
    """How contiguous data, and the stored bytes of chunks that are decoded here, are read."""

    AUTO = "auto"  # see `choose`
    MAP = "map"  # copy from memory maps: fastest once the pages are mapped; a disk error kills the rank (SIGBUS)
    READ = "read"  # preadv into the batch, which needs no other memory; a disk error raises DataError


def choose(mode: IoMode, *, directory: Path, file_bytes: int, map_bytes: int) -> IoMode:
    """Resolves AUTO: MAP on a local filesystem if all files together take at most `map_bytes`, else READ.

    Mapping a page costs more than reading it, so maps are for datasets that stay mapped. The pages belong to the
    page cache, which the kernel reclaims when it needs memory, but they count as memory of the process.
    """
    if mode is not IoMode.AUTO:
        return mode
    fits = file_bytes <= map_bytes
    return IoMode.READ if not fits or filesystem_of(directory).is_shared else IoMode.MAP
