"""Pauses Python's garbage collector while many objects are created, since it would traverse all of them repeatedly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disables cyclic garbage collection in all threads for the block; reference counting continues. Keep it short."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
