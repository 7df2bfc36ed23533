"""Determines the type of the filesystem that a path is on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

# On disks or in memory of this node. Any other type counts as shared, for which the engines are measured.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlay",
     "fuseblk", "vfat", "exfat", "ntfs", "ntfs3", "rootfs", "squashfs", "apfs", "hfs", "ufs"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """kind: the system's name of the type (`ext4`, `nfs4`, `lustre`, `fuse.glusterfs`), or `unknown`."""

    kind: str

    @property
    def is_shared(self) -> bool:
        """True if other nodes may see it: a network or parallel filesystem, or an unknown type."""
        return self.kind not in _LOCAL

    @property
    def is_written_past_cache(self) -> bool:
        """True if writing past the page cache is faster: measured on ext4, and xfs implements it in the same way."""
        return self.kind in ("ext4", "xfs")

    @property
    def keeps_blocks(self) -> bool:
        """True if FALLOC_FL_ZERO_RANGE keeps the blocks of a file: ext4 does, xfs allocates others."""
        return self.kind == "ext4"

    @property
    def is_lustre(self) -> bool:
        return self.kind == "lustre"


def filesystem_of(path: Path) -> Filesystem:
    """Returns the filesystem of `path`, or of its nearest existing parent."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # also skips a dead mount
        path = path.parent
    try:
        mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    except OSError:
        mounts = []
    return Filesystem(kind=kind_in(mounts, path=path.resolve()))


def kind_in(mounts: Iterable[tuple[str, str]], *, path: Path) -> str:
    """Returns the type of the mount that contains `path` (absolute, without symbolic links). Pure.

    mounts: (mount point, type), in the order of mounting. Of several at one mount point, the last one is visible.
    """
    kinds = {Path(point): kind for point, kind in mounts}
    return next((kinds[parent] for parent in (path, *path.parents) if parent in kinds), "unknown")
