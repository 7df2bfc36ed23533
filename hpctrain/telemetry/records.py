"""JSON lines: one record a line, one file a rank."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_BLOCK_BYTES = 1 << 16


def _plain(value: Any) -> Any:
    """Standard JSON has no NaN or infinity: they are written as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class RecordWriter:
    """Appends records to `path`, in a folder that is there. A record is in the kernel's hands when `write` returns.

    After a resume, steps that the killed run had recorded beyond its last checkpoint stand in the file twice:
    the later record is the one that counts.
    """

    def __init__(self, path: Path) -> None:
        _drop_torn_line(path)
        self._path = path
        self._file: IO[str] | None = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        except OSError as error:
            # A full disk must not end the training that the records are about.
            print(f"hpctrain: no more records in {self._path}: {error.strerror}", file=sys.stderr, flush=True)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _drop_torn_line(path: Path) -> None:
    """A killed rank may have left half a line: appended to, it would spoil the next one.

    Reads back from the end as far as the last whole line, which is one block however long the file is.
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
    """The records of a file. A last line that a killed rank left unfinished is passed over."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as one JSON file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(json.dumps(_plain(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
