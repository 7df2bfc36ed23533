"""Lustre: sets over how many servers a checkpoint file is striped, with the command `lfs` if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.storage import Filesystem

PAGE_BYTES = 4096
# As large as an extent, the unit of writing, which then lies on one server, and as Lustre's requests of 4 MiB.
STRIPE_BYTES = 4 << 20
_LUSTRE_DEFAULT_BYTES = 1 << 20
_BYTES_A_SERVER = 128 << 20
_MAX_SERVERS = 64
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripes:
    """Stripe layout of a file: the number of servers (OSTs), and the length of a stripe in bytes."""

    count: int
    size_bytes: int = STRIPE_BYTES

    def hints(self, *, num_ranks: int) -> Mapping[str, str]:
        """Returns the hints for MPI-IO: as many writing ranks (cb_nodes) as servers, but at most `num_ranks`. Pure."""
        return {
            "striping_factor": str(self.count),
            "striping_unit": str(self.size_bytes),
            "cb_nodes": str(max(1, min(self.count, num_ranks))),
        }


def stripes_for(file_bytes: int) -> Stripes:
    """Returns the stripe layout for a file of `file_bytes` bytes: one server per 128 MiB, but at most 64. Pure.

    For a small file more servers would only mean more locks.
    """
    return Stripes(count=min(max(1, -(-file_bytes // _BYTES_A_SERVER)), _MAX_SERVERS))


def set_stripes(path: Path, *, stripes: Stripes, filesystem: Filesystem) -> str | None:
    """Creates a file with a stripe layout, or sets the layout of future files in an existing folder. Not collective.

    Does nothing on filesystems other than Lustre. Returns None, or an error as text. The error is not raised, since a
    checkpoint with another layout is slower but valid.
    """
    if not filesystem.is_lustre:
        return None
    program = shutil.which("lfs")
    if program is None:
        return (
            "the filesystem is Lustre, but lfs is not in PATH: files have the stripe layout of the directory"
        )
    argv = [program, "setstripe", "-c", str(stripes.count), "-S", str(stripes.size_bytes), str(path)]
    try:
        # close_fds=False makes Python use posix_spawn: forking a process that runs MPI is not always safe.
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
    """Returns the alignment of large datasets in bytes: a page, or on Lustre the stripe size that `set_stripes` sets.

    Align only datasets of at least this size, since each smaller dataset would waste a stripe.
    """
    if not filesystem.is_lustre:
        return PAGE_BYTES
    return STRIPE_BYTES if shutil.which("lfs") is not None else _LUSTRE_DEFAULT_BYTES
