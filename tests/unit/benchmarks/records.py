"""A record with made-up content."""

from __future__ import annotations

from benchmarks.results_file import Record


def record(name: str, value: float = 1.0) -> Record:
    return Record(id=name, what="w", value=value, bar=1.0, sense="at most", unit="s/s", samples=[value])
