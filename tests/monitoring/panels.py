"""Asks Prometheus for what the panels of the dashboards show."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from hpctrain.monitoring import read_dashboards

# Expression -> the series that Prometheus finds now, each with `value`: a time and a number as text.
Ask = Callable[[str], list[dict[str, Any]]]
# What only runs on GPUs expose.
EMPTY_ON_CPUS = {"hpctrain_device_compute_seconds_total"}


def expressions(*, run: str) -> list[str]:
    """The expressions of all panels, with Grafana's variables replaced as Grafana does it."""
    values = {"$run": run, "$__rate_interval": "10s", "$__range": "5m"}
    found = []
    for dashboard in read_dashboards():
        for query in (query for panel in dashboard.panels for query in panel.queries):
            text = query.expr
            for name, value in values.items():
                text = text.replace(name, value)
            found.append(text)
    return found


def wait_for_data(asked: list[str], ask: Ask, *, timeout_s: float = 300) -> None:
    """Waits until each expression has returned a series with a finite number at least once.

    Raises AssertionError with those that have not.
    """
    deadline_s = time.monotonic() + timeout_s
    empty = asked
    while empty := [expression for expression in empty if not _finite(ask(expression))]:
        assert time.monotonic() < deadline_s, "no data for:\n" + "\n".join(empty)
        time.sleep(0.5)


def _finite(series: list[dict[str, Any]]) -> bool:
    return any(math.isfinite(float(one["value"][1])) for one in series)
