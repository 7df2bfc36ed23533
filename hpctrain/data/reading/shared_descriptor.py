"""A file descriptor that stays open as long as anything refers to it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import final


@final
class OpenFile:
    """A file opened for reading, closed with the last reference. Raises OSError if it cannot be opened.

    Keep this object, not its descriptor number, which may belong to another file after it was closed.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Closes the file now. May be called more than once."""
        self._close()
