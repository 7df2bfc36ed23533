"""Writes a run's records as JSON lines, one file per rank, and prints lines for the user."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from hpctrain.storage import replace_file
from hpctrain.telemetry.sinks import Sinks

_BLOCK_BYTES = 1 << 16
STEP = "step"  # the kind of the records that are made in every step


def _plain(value: Any) -> Any:
    """Replaces NaN and infinities, which standard JSON lacks, with the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


_encode = json.JSONEncoder(allow_nan=False).encode


def _line(record: dict[str, Any]) -> str:
    try:
        return _encode(record) + "\n"
    except ValueError:  # a number that is not finite, which is rare
        return _encode(_plain(record)) + "\n"


class RecordWriter:
    """Appends records (JSON objects about steps and events of a run) to the file `path`, whose folder must exist.

    Records of steps are collected for `every_s` seconds and written together, since each write may be a request to a
    server that thousands of ranks share. Any other record is written at once, together with the step records collected
    so far. A killed process thus loses the steps of at most `every_s` seconds. A record of a step must not be changed
    after it was passed.

    kinds: the kinds of records to write; the file is created when the first such record is written. None: all kinds are
    written, and the file is created at once. sinks: objects that receive every record, also records that are not
    written.

    Attributes:
        error: The error that ended the writing; None so far.

    After a resume, a step that the killed run had recorded after its last checkpoint is in the file twice; the later
    record counts.
    """

    def __init__(
        self,
        path: Path,
        *,
        every_s: float = 0.0,
        kinds: Collection[str] | None = None,
        sinks: Sinks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._kinds = kinds
        self._sinks = Sinks() if sinks is None else sinks
        self._clock = clock
        self._kept: list[dict[str, Any]] = []  # not written yet
        self._written_at = clock()
        self._ended = False
        self.error: OSError | None = None
        self._file: IO[bytes] | None = self._open() if kinds is None else None

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, or keeps it to be written later with others. Also passes the record to the sinks.

        If writing fails, one message is printed, and no record is written from then on.
        """
        self.write_all([record])

    def observe(self, record: dict[str, Any]) -> None:
        """Passes a record to the sinks (objects that receive all records) without writing it to the file."""
        self._sinks.receive(record)

    def write_all(self, records: Sequence[dict[str, Any]]) -> None:
        """Writes several records as `write` does, with at most one write to the file."""
        for record in records:
            self._sinks.receive(record)
        if self._ended:
            return
        kept = [record for record in records if self._kinds is None or record.get("kind") in self._kinds]
        if not kept:
            return
        self._kept += kept
        if kept[-1].get("kind") != STEP or self._clock() >= self._written_at + self._every_s:
            self._write()

    def close(self) -> None:
        """Writes the records that were kept to be written later. Records that come afterwards are not written.

        The sinks, which receive all records, stay open.
        """
        self._write()
        self._ended = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        _drop_torn_line(self._path)
        return self._path.open("ab", buffering=0)

    def _write(self) -> None:
        kept, self._kept = self._kept, []
        if not kept:
            return
        self._written_at = self._clock()
        try:
            self._file = self._file or self._open()
            data = memoryview("".join(map(_line, kept)).encode())
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            # A full disk must not end the training.
            self.error = error
            print(
                f"hpctrain: no further records are written to {self._path}: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
            self._ended = True


def _drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line of a file of records, which a killed rank may have left.

    Otherwise the next record would be appended to that line. Reads backwards to the end of the last complete line,
    which usually takes one block, however large the file is.
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
    """Writes `value` as a JSON file atomically, and creates the file's folder if needed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"
    replace_file(path, content.encode(), partial=path.with_name(f".{path.name}.{os.getpid()}.partial"))


def tell(text: str, *, end: str = "\n") -> None:
    """Prints a text to standard output and flushes it.

    If the reader has closed the pipe (`| head`), output is dropped and the run continues.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        # Python flushes again at exit; an error there would end the process with exit code 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
