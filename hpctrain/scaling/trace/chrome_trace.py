"""Spans of all ranks in the Trace Event Format of Chrome, which Perfetto (ui.perfetto.dev) shows. Pure.

Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpctrain.scaling.trace.read_trace import RankTrace, Span

_MAIN = 0


def chrome_trace(
    traces: Sequence[RankTrace], *, horovod: Sequence[dict[str, Any]] = (), until_margin_s: float = 0.1
) -> dict[str, Any]:
    """Returns one trace: a process for each rank, with its main thread and as many rows as buckets are in flight.

    Times are microseconds since the first span. horovod: events of Horovod's timeline, with times in microseconds since
    1970; those from the first span to the last are added, with a margin on both sides. At least one span.
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
    rows: list[float] = []  # until when each row is taken: spans of a row must not overlap
    for span in sorted((s for s in trace.spans if s.bucket is not None), key=lambda s: s.begin_s):
        free = [row for row, until_s in enumerate(rows) if until_s <= span.begin_s]
        row = free[0] if free else len(rows)
        if row == len(rows):
            rows.append(0.0)
            yield _named("thread_name", f"reduction {row + 1}", rank=trace.rank, row=row + 1)
        rows[row] = span.end_s
        yield _event(span, rank=trace.rank, row=row + 1, zero_s=zero_s)


def _event(span: Span, *, rank: int, row: int, zero_s: float) -> dict[str, Any]:
    number = {} if span.bucket is None else {"bucket": span.bucket}
    return {
        "ph": "X", "name": span.name, "cat": "main" if row == _MAIN else "reduction", "pid": rank, "tid": row,
        "ts": (span.begin_s - zero_s) * 1e6, "dur": (span.end_s - span.begin_s) * 1e6,
        "args": {"step": span.step, **number},
    }  # fmt: skip


def _named(kind: str, name: str, *, rank: int, row: int = _MAIN) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}
