"""Sinks: what receives a run's records besides its own files, such as a monitoring system."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

Record = Mapping[str, Any]


class Sink(Protocol):
    """Receives every record of one rank, on the thread that trains.

    Records are those of `docs/metrics.md`, those of steps that `telemetry.metrics_every_steps` leaves out of the files,
    and the kinds `begins` (first: training begins) and `checkpoint_begun`. A record must not be changed.
    """

    name: str  # for messages, as "Prometheus endpoint"

    def receive(self, record: Record) -> None:
        """Takes a record in some microseconds: whatever takes longer belongs on a separate thread of the sink.

        May raise any Exception: then the sink is closed and gets no more records.
        """

    def close(self) -> None:
        """Ends the sink, however the run ends. Takes a few seconds at most."""


@final
class Sinks:
    """Hands records to several sinks. One that fails is reported once and closed; training goes on.

    warn: prints a line; None: on standard error. Sinks are closed in the order in which they were opened.
    """

    def __init__(self, *, warn: Callable[[str], None] | None = None) -> None:
        self._sinks: list[Sink] = []
        self._warn = warn or _print_warning

    def open(self, name: str, make: Callable[[], Sink]) -> None:
        """Adds the sink that `make` returns. If that raises an Exception, it is reported, and the run goes on without.

        name: of the sink, for the warning.
        """
        try:
            self._sinks.append(make())
        except Exception as error:
            self._warn(f"no {name}: {_describe(error)}; training goes on without it")

    def receive(self, record: Record) -> None:
        """Hands `record` to all sinks. Does not raise."""
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
