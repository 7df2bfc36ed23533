"""Sinks: objects that receive a run's records, besides the run's own files."""

from __future__ import annotations

import importlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, final

# Sinks: what receives a run's records besides its own files, such as a monitoring system.


Record = Mapping[str, Any]


class Sink(Protocol):
    """The interface of an object that receives every record (JSON object about a step or event) of one rank.

    Records are passed on the thread that trains. The records are those of `docs/metrics.md`, including steps that
    `telemetry.metrics_every_steps` leaves out of the files. There are two further kinds: `begins` (sent first, when
    training starts) and `checkpoint_begun`. A sink must not change records.
    """

    name: str  # for messages, as "Prometheus endpoint"

    def receive(self, record: Record) -> None:
        """Receives a record. This must take only some microseconds; longer work belongs on a thread of the sink.

        If `receive` raises an Exception, the sink is closed and gets no more records.
        """

    def close(self) -> None:
        """Ends the sink, however the run ends, within a few seconds."""


@final
class Sinks:
    """Passes records to several sinks. A sink that fails is reported once and closed; training continues.

    Sinks are closed in the order in which they were opened. warn: a function that prints a line; None: lines are
    printed to standard error.
    """

    def __init__(self, *, warn: Callable[[str], None] | None = None) -> None:
        self._sinks: list[Sink] = []
        self._warn = warn or _print_warning

    def open(self, name: str, make: Callable[[], Sink]) -> None:
        """Adds the sink (an object that receives all records of the run) that `make` returns.

        If `make` raises an Exception, the exception is reported and the run continues without the sink.

        name: the name of the sink, for the warning.
        """
        try:
            self._sinks.append(make())
        except Exception as error:
            self._warn(f"the {name} could not be opened: {_describe(error)}; training goes on without it")

    def receive(self, record: Record) -> None:
        """Passes a record to all sinks. Raises no errors: a sink that fails is closed."""
        for sink in tuple(self._sinks):
            try:
                sink.receive(record)
            except Exception as error:
                self._warn(
                    f"the {sink.name} failed and is off from now on: {_describe(error)}; training goes on"
                )
                self._sinks.remove(sink)
                self._close(sink)

    def close(self) -> None:
        """Closes all sinks. Does not raise. Later records are dropped."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._close(sink)

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            self._warn(f"the {sink.name} could not be closed: {_describe(error)}")


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _print_warning(text: str) -> None:
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)


# The names of a run's numbers by step, for programs that draw them. Pure.


_OF_STEPS = ("loss", "lr", "grad_norm", "loss_scale")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by name, such as `loss` and `seconds/compute`; {} if there are no numbers.

    record: a record of docs/metrics.md, read from a file or not yet written. All values become float; in files, the
    text "nan", "inf" or "-inf" stands for a number that is not finite.
    """
    kind = record["kind"]
    if kind == "step":
        found = {name: record[name] for name in _OF_STEPS} | _below("seconds", record["seconds"])
    elif kind == "evaluation":
        found = _below("evaluation", record["quality"])
    elif kind == "checkpoint":
        names = ("stall_seconds", "write_seconds", "mb_per_s", "bytes")
        found = {f"checkpoint/{name}": record[name] for name in names}
    elif kind == "efficiency":
        found = _below("efficiency", record["factors"]) | _below("parts", record["parts"])
    else:
        return {}
    return {name: float(value) for name, value in found.items()}


def _below(folder: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{folder}/{name}": value for name, value in values.items()}


# A sink that writes a run's numbers for TensorBoard.


_FLUSH_EVERY_S = 10.0
_CLOSING_MAY_TAKE_S = 5.0


@final
class TensorBoardSink:
    """Writes an event file into `folder`, on its own thread. Only rank 0 needs this sink.

    A record of kind `begins` or `roll_back` makes earlier events of the steps that are trained again obsolete;
    TensorBoard hides obsolete events. Raises ImportError if tensorboard is not installed, OSError if the file cannot be
    created.
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
        """Writes the remaining events. Raises OSError if this fails, or if writing failed after the last `receive`."""
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
