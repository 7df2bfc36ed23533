"""What kind of filesystem a path is on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# These lie on disks or in memory of this node. Whatever is not listed is taken for shared: then it is tried out.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlay",
     "fuseblk", "vfat", "exfat", "ntfs", "ntfs3", "rootfs", "squashfs", "apfs", "hfs", "ufs"}
)  # fmt: skip
_ESCAPED = re.compile(r"\\([0-7]{3})")
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """kind: as the system calls it (`ext4`, `nfs4`, `lustre`, `fuse.glusterfs`); `unknown` where it cannot be told."""

    kind: str

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may see it: a network or parallel filesystem, or one we do not know."""
        return self.kind not in _LOCAL

    @property
    def is_written_past_cache(self) -> bool:
        """Whether writing past the page cache is known to be faster: measured on ext4; xfs does it alike."""
        return self.kind in ("ext4", "xfs")

    @property
    def keeps_blocks(self) -> bool:
        """Whether a file whose content is declared empty keeps the blocks it has: ext4 does, xfs finds others."""
        return self.kind == "ext4"

    @property
    def is_lustre(self) -> bool:
        return self.kind == "lustre"


def filesystem_of(path: Path, *, mounts: Path = MOUNTS) -> Filesystem:
    """The filesystem of `path`, or of its nearest parent that is there. mounts: the kernel's list (proc(5))."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # a dead mount is not there, too
        path = path.parent
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return Filesystem(kind="unknown")
    return Filesystem(kind=kind_in(lines, path=path.resolve()))


def kind_in(lines: list[str], *, path: Path) -> str:
    """The kind of the mount that `path`, absolute and without links, lies in. Pure.

    lines: of mountinfo. Of mounts on one place the last covers the others.
    """
    found, depth = "unknown", -1
    parts = path.parts
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])).parts
        if len(point) >= depth and parts[: len(point)] == point:
            found, depth = right.split(" ", 1)[0], len(point)
    return found
