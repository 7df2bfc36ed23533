"""A file's descriptor that lives as long as somebody may still read from it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import final


@final
class OpenFile:
    """Opened for reading; closed with the last reference. Raises OSError.

    Who reads later holds this object, not its number: a number that was closed may be another file's by then.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Close it now. May be called again."""
        self._close()
