"""Lustre: over how many servers a checkpoint file is striped, asked of `lfs` where it is there."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.files.filesystem_type import Filesystem

PAGE_BYTES = 4096
# One extent, the unit of writing, lies on one server; large enough for Lustre's 4 MiB requests.
STRIPE_BYTES = 4 << 20
_LUSTRE_DEFAULT_BYTES = 1 << 20
_BYTES_A_SERVER = 128 << 20
_MAX_SERVERS = 64
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripes:
    """count: servers (OSTs) that a file is spread over. size_bytes: of a stripe."""

    count: int
    size_bytes: int = STRIPE_BYTES

    def hints(self, *, num_ranks: int) -> Mapping[str, str]:
        """For MPI: as many ranks write to the servers as there are servers, at most all. Pure."""
        return {
            "striping_factor": str(self.count),
            "striping_unit": str(self.size_bytes),
            "cb_nodes": str(max(1, min(self.count, num_ranks))),
        }


def stripes_for(file_bytes: int) -> Stripes:
    """One server for each 128 MiB begun, at most 64: a small file on many servers only costs more locks. Pure."""
    return Stripes(count=min(max(1, -(-file_bytes // _BYTES_A_SERVER)), _MAX_SERVERS))


def set_stripes(path: Path, *, stripes: Stripes, filesystem: Filesystem) -> str | None:
    """Ask Lustre to stripe `path` so: a file that is not there yet, which is made, or a folder's future files.

    What went wrong, in words, or None: a checkpoint that is striped otherwise is slower, not wrong. Does nothing
    on other filesystems. One rank calls it.
    """
    if not filesystem.is_lustre:
        return None
    program = shutil.which("lfs")
    if program is None:
        return "the filesystem is Lustre, and lfs is not in PATH: files are striped as the directory says"
    argv = [program, "setstripe", "-c", str(stripes.count), "-S", str(stripes.size_bytes), str(path)]
    try:
        # With close_fds=False it is a posix_spawn: forking a process that runs MPI is not safe everywhere.
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT_S, check=False, close_fds=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"lfs setstripe did not run: {error}"
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        return f"lfs setstripe ended with {done.returncode}: {said}"
    return None


def alignment_of(filesystem: Filesystem) -> int:
    """Bytes that large datasets begin at a multiple of: a page, or on Lustre the stripe that `set_stripes` asks for.

    Only datasets of at least this size should be aligned, or small ones waste a stripe each.
    """
    if not filesystem.is_lustre:
        return PAGE_BYTES
    return STRIPE_BYTES if shutil.which("lfs") is not None else _LUSTRE_DEFAULT_BYTES
