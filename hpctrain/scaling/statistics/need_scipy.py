"""Checks that scipy, an optional dependency, is installed."""

from __future__ import annotations

import importlib.util

from hpctrain.errors import UsageError


def check_scipy() -> None:
    """Raises UsageError if scipy is not installed. Call it before importing modules that need scipy."""
    if importlib.util.find_spec("scipy") is None:
        raise UsageError(
            "intervals and fits need scipy, which is not installed: pip install 'hpctrain[scaling]'"
        )
