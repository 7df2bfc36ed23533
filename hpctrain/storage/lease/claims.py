"""The leases of this process, which end with it: one for each directory that it writes to."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path

from hpctrain.storage.lease.lease import Lease, Place

_leases: dict[tuple[str, bool], Lease] = {}
_lock = threading.Lock()


def claim(directory: Path, *, beside: bool = False, say: Callable[[str], object] = lambda text: None) -> None:
    """Takes the lease on `directory`, which exists, or checks that this process still has it.

    beside: the lease's file is in the parent, for a directory of which users list the content. Asks whether two files
    exist if this process has the lease. Raises InUseError if another one has, and OSError.
    """
    key = _key(directory, beside=beside)
    with _lock:
        lease = _leases.get(key)
        if lease is None:
            path = Path(key[0])
            _leases[key] = Lease.take(Place.beside(path) if beside else Place.within(path), say=say)
        else:
            lease.check()


def check_claim(directory: Path, *, beside: bool = False) -> None:
    """Raises InUseError if this process had the lease on `directory` and another one has taken it over."""
    lease = _leases.get(_key(directory, beside=beside))
    if lease is not None:
        lease.check()


def release(directory: Path, *, beside: bool = False) -> None:
    """Gives the lease on `directory` back, if this process has it."""
    with _lock:
        lease = _leases.pop(_key(directory, beside=beside), None)
    if lease is not None:
        lease.release()


@atexit.register
def release_all() -> None:
    """Gives all leases of this process back."""
    while _leases:
        _leases.popitem()[1].release()


def _key(directory: Path, *, beside: bool) -> tuple[str, bool]:
    return os.path.realpath(directory), beside
