"""The leases of this process, which end with it: one for each directory that it writes to."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path

from hpctrain.storage.lease.lease import Lease

_leases: dict[str, Lease] = {}
_lock = threading.Lock()


def claim(directory: Path, *, say: Callable[[str], object] = lambda text: None) -> None:
    """Takes the lease on `directory`, which exists, or checks that this process still has it.

    One listing of the directory if it has it. Raises InUseError if another process has, and OSError.
    """
    key = os.path.realpath(directory)
    with _lock:
        lease = _leases.get(key)
        if lease is None:
            _leases[key] = Lease.take(Path(key), say=say)
        else:
            lease.check()


def check_claim(directory: Path) -> None:
    """Raises InUseError if this process had the lease on `directory` and another one has taken it over."""
    lease = _leases.get(os.path.realpath(directory))
    if lease is not None:
        lease.check()


def release(directory: Path) -> None:
    """Gives the lease on `directory` back, if this process has it."""
    with _lock:
        lease = _leases.pop(os.path.realpath(directory), None)
    if lease is not None:
        lease.release()


@atexit.register
def release_all() -> None:
    """Gives all leases of this process back."""
    while _leases:
        _leases.popitem()[1].release()
