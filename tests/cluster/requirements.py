"""Whether this machine can hold a cluster, and if not, why, in words."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SBIN = "/usr/sbin:/sbin:/usr/local/sbin"
_PROGRAMS = (
    "slurmctld", "slurmd", "srun", "sbatch", "munged", "ip", "tc", "unshare", "nsenter", "setpriv", "mount",
)  # fmt: skip
_GLUSTER_PROGRAMS = ("glusterd", "glusterfs", "glusterfsd", "gluster")
FUSE = Path("/dev/fuse")


def search_path() -> str:
    """PATH with the folders of system programs, which a user's PATH may lack."""
    return f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"


@functools.cache
def why_not() -> str | None:
    """Why there can be no cluster here; None when there can."""
    if os.geteuid() != 0:
        return "a cluster on one machine needs root, for its namespaces"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; run `make cluster-setup`"
    try_it = "unshare --net --uts --mount --pid --fork ip link add end-a type veth peer name end-b"
    tried = subprocess.run(
        try_it.split(), capture_output=True, text=True, check=False, env={**os.environ, "PATH": search_path()}
    )
    if tried.returncode != 0:
        return f"no namespaces or virtual links here: {tried.stderr.strip()}"
    return None


def why_no_volumes(directory: Path) -> str | None:
    """Why a cluster in `directory`, which exists, can have no volumes of GlusterFS; None when it can."""
    missing = [name for name in _GLUSTER_PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; run `make cluster-setup`"
    if not FUSE.exists():
        return f"this machine has no {FUSE}"
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        try:
            os.setxattr(file.name, "trusted.hpct-test", b"1")
        except OSError as error:
            return f"the filesystem of {directory} keeps no trusted attributes: {error.strerror}"
    return None
