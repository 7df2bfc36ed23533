"""Reads the ranks' traces of steps and Horovod's timeline, and writes them in Chrome's format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.scaling.trace.trace_steps import TRACE_FOLDER
from hpctrain.telemetry import read_records

# Reads the ranks' spans of traced steps, and converts their times to rank 0's clock.


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A named time interval in a step. `begin_s` and `end_s` are in seconds since 1970, by rank 0's clock.

    bucket: index of the bucket that is reduced in this interval; None for a span of the main thread.
    """

    step: int
    name: str
    begin_s: float
    end_s: float
    bucket: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The spans of one rank in one range of steps.

    error_s: largest error in seconds of the conversion of this rank's clock to rank 0's clock.
    """

    rank: int
    node: str
    spans: tuple[TraceSpan, ...]
    error_s: float


def read_traces(directory: Path) -> list[RankTrace]:
    """Returns the traces of all ranks of the run in `directory`, for every range of steps.

    Raises UsageError if there is no trace, or if a trace cannot be read.
    """
    folders = sorted((directory / TRACE_FOLDER).glob("step-*"))
    found = [trace for folder in folders for trace in _read_range(folder)]
    if not found:
        raise UsageError(
            f"{directory} has no trace: set telemetry.trace_steps in the recipe, as '100-105', and run these steps"
        )
    return found


def _read_range(folder: Path) -> list[RankTrace]:
    first = folder / "rank-00000.jsonl"
    try:
        of_rank_0 = list(read_records(first))
        head = of_rank_0[0]
        # From rank 0's monotonic clock to seconds since 1970.
        epoch_s = head["time"] - head["clock_s"]
        paths = [folder / f"rank-{rank:05}.jsonl" for rank in range(head["ranks"])]
        records = [of_rank_0, *(list(read_records(path)) for path in paths[1:])]
        return [_on_rank_0s_clock(lines, epoch_s=epoch_s) for lines in records]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"the trace in {folder} cannot be read ({type(error).__name__}: {error}): a rank that was killed leaves it "
            "incomplete; trace the steps again, or remove the folder"
        ) from error


def _on_rank_0s_clock(records: Sequence[dict[str, Any]], *, epoch_s: float) -> RankTrace:
    head = records[0]
    clocks = [record for record in records if record["kind"] == "clock"]
    at_s = [clock["clock_s"] for clock in clocks]
    offsets_s = [clock["offset_s"] for clock in clocks]

    def shared(clock_s: float) -> float:
        # Clocks drift in proportion to time: linear between the comparisons before and after.
        return clock_s + float(np.interp(clock_s, at_s, offsets_s)) + epoch_s

    spans = tuple(
        TraceSpan(
            step=record["step"], name=record["name"], begin_s=shared(record["begin_s"]),
            end_s=shared(record["end_s"]), bucket=record.get("bucket"),
        )
        for record in records
        if record["kind"] == "span"
    )  # fmt: skip
    error_s = max(clock["error_s"] for clock in clocks)
    return RankTrace(rank=head["rank"], node=head["node"], spans=spans, error_s=error_s)


# Spans of all ranks in the Trace Event Format of Chrome, which Perfetto (ui.perfetto.dev) shows. Pure.
#
# Source: "Trace Event Format", Google, 2016.


_MAIN = 0


def chrome_trace(
    traces: Sequence[RankTrace], *, horovod: Sequence[dict[str, Any]] = (), until_margin_s: float = 0.1
) -> dict[str, Any]:
    """Returns one trace with a process per rank. A process has a row for its main thread and one per bucket in flight.

    Times are in microseconds since the first span; there must be at least one span. horovod: events of Horovod's
    timeline, with times in microseconds since 1970. The result has those Horovod events that are between the first and
    the last span, or at most `until_margin_s` seconds before or after.
    """
    spans = [span for trace in traces for span in trace.spans]
    zero_s = min(span.begin_s for span in spans)
    end_s = max(span.end_s for span in spans)
    events: list[dict[str, Any]] = []
    for trace in traces:
        events += _rank_events(trace, zero_s=zero_s)
    first_us, last_us = (zero_s - until_margin_s) * 1e6, (end_s + until_margin_s) * 1e6
    for event in horovod:
        if "ts" not in event or event["ph"] == "M":
            events.append(event)
        elif first_us <= event["ts"] <= last_us:
            events.append({**event, "ts": event["ts"] - zero_s * 1e6})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "rank 0's, seconds since 1970 of time 0",
            "zero_s": zero_s,
            "clock_error_us": max(trace.error_s for trace in traces) * 1e6,
        },
    }


def _rank_events(trace: RankTrace, *, zero_s: float) -> Iterable[dict[str, Any]]:
    yield _named("process_name", f"rank {trace.rank} ({trace.node})", rank=trace.rank)
    yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}}
    yield _named("thread_name", "main", rank=trace.rank)
    for span in sorted((s for s in trace.spans if s.bucket is None), key=lambda s: s.begin_s):
        yield _event(span, rank=trace.rank, row=_MAIN, zero_s=zero_s)
    rows: list[float] = []  # the end of each row's last span: spans of a row must not overlap
    for span in sorted((s for s in trace.spans if s.bucket is not None), key=lambda s: s.begin_s):
        free = [row for row, until_s in enumerate(rows) if until_s <= span.begin_s]
        row = free[0] if free else len(rows)
        if row == len(rows):
            rows.append(0.0)
            yield _named("thread_name", f"reduction {row + 1}", rank=trace.rank, row=row + 1)
        rows[row] = span.end_s
        yield _event(span, rank=trace.rank, row=row + 1, zero_s=zero_s)


def _event(span: TraceSpan, *, rank: int, row: int, zero_s: float) -> dict[str, Any]:
    number = {} if span.bucket is None else {"bucket": span.bucket}
    return {
        "ph": "X", "name": span.name, "cat": "main" if row == _MAIN else "reduction", "pid": rank, "tid": row,
        "ts": (span.begin_s - zero_s) * 1e6, "dur": (span.end_s - span.begin_s) * 1e6,
        "args": {"step": span.step, **number},
    }  # fmt: skip


def _named(kind: str, name: str, *, rank: int, row: int = _MAIN) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


# Reads the timeline that Horovod writes to HOROVOD_TIMELINE, with times since 1970.


# Horovod numbers its tensors from 0 as processes of its trace: they come after the ranks.
_FIRST_PROCESS = 1_000_000
_EPOCH = "start_time_since_epoch_in_micros"


def read_horovod_timeline(path: Path) -> list[dict[str, Any]]:
    """Returns the events of Horovod's timeline, with `ts` in microseconds since 1970.

    The clock is that of rank 0's node, where the file was written. The end of the file may be missing. Raises
    UsageError if the file cannot be read or does not contain its start time (Horovod before 0.21). Source of the
    format: horovod/common/timeline.cc of Horovod 0.28.1.
    """
    try:
        events = _events(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as Horovod's timeline: {error}") from error
    began_us = next((e["args"][_EPOCH] for e in events if _EPOCH in e.get("args", {})), None)
    if began_us is None:
        raise UsageError(
            f"{path} does not say when it began ({_EPOCH}): it is not a timeline of Horovod 0.21 or later"
        )
    return [_moved(event, began_us=began_us) for event in events if "pid" in event]


def _events(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError:  # the run was killed while Horovod wrote
        found = json.loads(text[: text.rindex("},") + 1] + "]")
    if not isinstance(found, list):
        raise ValueError("it is not a list of events")
    return [event for event in found if isinstance(event, dict)]


def _moved(event: dict[str, Any], *, began_us: int) -> dict[str, Any]:
    moved = {**event, "pid": event["pid"] + _FIRST_PROCESS}
    if event.get("ph") == "M":
        name = event.get("args", {}).get("name")
        return {**moved, "args": {"name": f"Horovod: {name}"}} if name is not None else moved
    return {**moved, "ts": event["ts"] + began_us} if "ts" in event else moved
