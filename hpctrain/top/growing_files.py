"""Files of a run that is going on: JSON lines that are appended, and small files that are replaced as a whole.

Each is opened whenever it is looked at: over NFS the size of a file is only current after an open.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, final


@final
class AppendedRecords:
    """The records of a file that were not read yet.

    max_bytes: how much a call reads at most, from the file's end. modified: the file's time, s since 1970, by the file
    server's clock.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._inode = 0
        self._offset = 0
        self.modified = 0.0

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete lines that were appended since the last call; all of a file that has replaced it.

        Of more than `max_bytes` the last ones. Returns none if the file does not exist. Raises OSError.
        """
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                self.modified = found.st_mtime
                begin = max(self._offset, found.st_size - self._max_bytes)
                file.seek(begin)
                data = file.read(found.st_size - begin)
        except FileNotFoundError:
            self._inode = self._offset = 0
            return []
        end = data.rfind(b"\n") + 1
        self._offset = begin + end
        return [record for line in data[:end].splitlines() if (record := _object(line)) is not None]


@final
class SmallFile:
    """A file that is replaced as a whole. content: None while there is no such file. modified: its time, s since 1970,
    by the file server's clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.content: bytes | None = None
        self.modified = 0.0

    def refresh(self) -> bool:
        """Reads the file if it has changed. Returns whether it has. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_size, found.st_mtime_ns)
                if seen == self._seen:
                    return False
                self._seen, self.content, self.modified = seen, file.read(), found.st_mtime
        except FileNotFoundError:
            changed = self._seen is not None
            self._seen, self.content, self.modified = None, None, 0.0
            return changed
        return True

    def json(self) -> dict[str, Any] | None:
        """Returns the object that the file holds; None if it holds none."""
        return None if self.content is None else _object(self.content)


def _object(text: bytes) -> dict[str, Any] | None:
    """Returns the JSON object; None for anything else, such as the rest of a line whose begin was not read."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
