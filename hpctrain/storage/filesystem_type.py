"""Determines the type of the filesystem that a path is on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

# On disks or in memory of this node. Any other type counts as shared, for which the engines are measured.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlay",
     "fuseblk", "vfat", "exfat", "ntfs", "ntfs3", "rootfs", "squashfs", "apfs", "hfs", "ufs"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """kind: the system's name of the type (`ext4`, `nfs4`, `lustre`, `fuse.glusterfs`), or `unknown`.

    options: of the mount, such as `rw` and `soft`.
    """

    kind: str
    options: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """True if other nodes may see it: a network or parallel filesystem, or an unknown type."""
        return self.kind not in _LOCAL

    @property
    def is_written_past_cache(self) -> bool:
        """True if writing past the page cache is faster: measured on ext4, and xfs implements it in the same way."""
        return self.kind in ("ext4", "xfs")

    @property
    def is_lustre(self) -> bool:
        return self.kind == "lustre"


def filesystem_of(path: Path) -> Filesystem:
    """Returns the filesystem of `path`, or of its nearest existing parent."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # also skips a dead mount
        path = path.parent
    try:
        parts = psutil.disk_partitions(all=True)
    except OSError:
        parts = []
    found = on_mount(((part.mountpoint, part) for part in parts), path=path.resolve())
    if found is None:
        return Filesystem(kind="unknown")
    return Filesystem(kind=found.fstype, options=tuple(found.opts.split(",")))


def on_mount(mounts: Iterable[tuple[str, T]], *, path: Path) -> T | None:
    """Returns what belongs to the mount that contains `path` (absolute, without symbolic links). Pure.

    mounts: (mount point, anything), in the order of mounting. Of several at one mount point, the last one is visible.
    """
    kinds = {Path(point): kind for point, kind in mounts}
    return next((kinds[parent] for parent in (path, *path.parents) if parent in kinds), None)
