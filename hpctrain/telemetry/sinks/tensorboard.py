"""A sink that writes a run's numbers for TensorBoard."""

from __future__ import annotations

import importlib
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from hpctrain.telemetry.sinks.scalars import scalars_of

_FLUSH_EVERY_S = 10.0
_CLOSING_MAY_TAKE_S = 5.0


@final
class TensorBoardSink:
    """Writes an event file into `folder`, on a thread of its own. For rank 0.

    The records `begins` and `roll_back` say from which step on earlier events no longer count: TensorBoard hides them.
    Raises ImportError if tensorboard is not installed, OSError if the file cannot be made.
    """

    name = "file for TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writers = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        number = sum(1 for _ in folder.iterdir())
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._file = writers.RecordWriter((folder / name).open("xb"))
        self._write(0, time=time.time(), file_version="brain.Event:2")
        self._file.flush()
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._write_until_closed, name="hpctrain-tensorboard", daemon=True
        )
        self._thread.start()

    def receive(self, record: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._records.put(record)

    def close(self) -> None:
        """Writes what is left. Raises OSError if that fails, or has failed since the last record."""
        reported = self._error
        self._records.put(None)
        self._thread.join(_CLOSING_MAY_TAKE_S)
        if self._error is not reported and self._error is not None:
            raise self._error

    def _write_until_closed(self) -> None:
        flush_at = time.monotonic() + _FLUSH_EVERY_S
        try:
            while True:
                try:
                    record = self._records.get(timeout=max(0.0, flush_at - time.monotonic()))
                except queue.Empty:
                    self._file.flush()
                    flush_at = time.monotonic() + _FLUSH_EVERY_S
                    continue
                if record is None:
                    break
                self._add(record)
            self._file.close()
        except Exception as error:  # the thread that trains raises it
            self._error = error

    def _add(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "begins":
            self._begin_after(record["step"], time=record["time"])
        elif kind == "roll_back":
            self._begin_after(record["to_step"], time=record["time"])
        elif scalars := scalars_of(record):
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()
            ]
            summary = self._summaries.Summary(value=values)
            self._write(record["step"], time=record["time"], summary=summary)

    def _begin_after(self, step: int, *, time: float) -> None:
        started = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step + 1, time=time, session_log=started)

    def _write(self, step: int, *, time: float, **what: Any) -> None:
        event = self._events.Event(step=step, wall_time=time, **what)
        self._file.write(event.SerializeToString())
