"""Computes from a trace of torch.profiler how long copies and kernels run at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """In milliseconds: time in which at least one kernel runs, at least one copy, at least one of each (`both`)."""

    kernels_ms: float
    copies_ms: float
    both_ms: float

    @property
    def share(self) -> float:
        """Share of the copies' time in which kernels run too."""
        return self.both_ms / self.copies_ms if self.copies_ms else 0.0


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def overlap(events: Iterable[dict[str, Any]]) -> Overlap:
    """Returns the overlap of kernels with copies between GPU and host. events: `traceEvents` of the trace."""
    kernels: Spans = []
    copies: Spans = []
    for event in events:
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy" and ("DtoH" in event["name"] or "HtoD" in event["name"]):
            copies.append(span)
    kernels, copies = merged(kernels), merged(copies)
    return Overlap(
        kernels_ms=_length(kernels) / 1e3,
        copies_ms=_length(copies) / 1e3,
        both_ms=_common(kernels, copies) / 1e3,
    )


def merged(spans: Sequence[tuple[float, float]]) -> Spans:
    """Returns the union of the spans as disjoint spans in ascending order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def _common(some: Spans, others: Spans) -> float:
    """Returns the length of the intersection. some, others: as `merged` returns them."""
    return _length(some) + _length(others) - _length(merged([*some, *others]))
