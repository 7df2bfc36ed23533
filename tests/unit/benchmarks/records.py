"""A record with made-up content."""

from __future__ import annotations

import importlib

from benchmarks.harness import Suite
from benchmarks.results_file import Record

SUITES = (
    "checkpoint", "data", "growth", "overhead", "parallel", "prediction", "reduction", "start", "step",
)  # fmt: skip


def suite_of(name: str) -> Suite:
    found: Suite = importlib.import_module(f"benchmarks.{name}.suite").SUITE
    return found


def record(name: str, value: float = 1.0) -> Record:
    return Record(id=name, what="w", value=value, bar=1.0, sense="at most", unit="s/s", samples=[value])
