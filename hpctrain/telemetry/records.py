"""Records of a run as JSON lines, one file a rank; and lines for the user on standard output."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hpctrain.storage import replace_file

_BLOCK_BYTES = 1 << 16


def _plain(value: Any) -> Any:
    """Replaces NaN and infinities, which standard JSON does not have, by the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class RecordWriter:
    """Appends records to `path`; its folder must exist. `write` flushes each record to the operating system.

    After a resume, steps that the killed run had recorded beyond its last checkpoint are in the file twice; the later
    record counts.
    """

    def __init__(self, path: Path) -> None:
        _drop_torn_line(path)
        self._path = path
        self._file: IO[str] | None = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record. After an OSError it prints one message and drops this and all later records."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        except OSError as error:
            # A full disk must not end the training.
            print(f"hpctrain: no more records in {self._path}: {error.strerror}", file=sys.stderr, flush=True)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line, left by a killed rank, to which the next record would be appended.

    Reads backwards to the last complete line, usually one block, whatever the length of the file.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        num_bytes = whole_bytes = os.fstat(descriptor).st_size
        while whole_bytes:
            start = max(0, whole_bytes - _BLOCK_BYTES)
            newline = os.pread(descriptor, whole_bytes - start, start).rfind(b"\n")
            if newline >= 0:
                whole_bytes = start + newline + 1
                break
            whole_bytes = start
        if whole_bytes < num_bytes:
            os.ftruncate(descriptor, whole_bytes)
    finally:
        os.close(descriptor)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file. Skips an incomplete last line, which a killed rank may leave. Raises OSError."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as a JSON file atomically. Makes the folder if needed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"
    replace_file(path, content.encode(), partial=path.with_name(f".{path.name}.{os.getpid()}.partial"))


def tell(text: str, *, end: str = "\n") -> None:
    """Prints and flushes. If the reader has closed the pipe (`| head`), output is discarded; the run continues."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        # Python flushes again at exit; an error there would end the process with exit code 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
