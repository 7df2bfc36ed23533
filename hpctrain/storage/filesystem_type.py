"""Finds the type of the filesystem on which a path lies, and what is known about that type."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

# Filesystems on disks or in memory of this node. Any other type counts as shared between nodes.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlay",
     "fuseblk", "vfat", "exfat", "ntfs", "ntfs3", "rootfs", "squashfs", "apfs", "hfs", "ufs"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """Type of a filesystem, and the options of its mount.

    `kind` is the system's name of the type, such as `ext4`, `nfs4`, `lustre` or `fuse.glusterfs`, or `unknown`.
    `options` contains the options of the mount, such as `rw` and `soft`.
    """

    kind: str
    options: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """True if other nodes may see the files: a network or parallel filesystem, or an unknown type."""
        return self.kind not in _LOCAL

    @property
    def is_written_past_cache(self) -> bool:
        """True if writes that bypass the page cache are faster on this type of filesystem.

        This was measured on ext4; xfs implements such writes in the same way.
        """
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
    """Returns the value, in the list `mounts`, of the mount on which `path` lies; None if there is no such mount. Pure.

    `mounts` lists (mount point, value) in the order of mounting. If several mounts have the same mount point, the
    last mount is used, since only that mount is visible. `path` is absolute, without symbolic links.
    """
    kinds = {Path(point): kind for point, kind in mounts}
    return next((kinds[parent] for parent in (path, *path.parents) if parent in kinds), None)
