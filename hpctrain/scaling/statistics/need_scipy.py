"""Says in plain words that scipy, an optional dependency, is missing."""

from __future__ import annotations

import importlib.util

from hpctrain.errors import UsageError


def check_scipy() -> None:
    """Raises UsageError if scipy is not installed. To be called before what computes with it is imported."""
    if importlib.util.find_spec("scipy") is None:
        raise UsageError(
            "intervals and fits need scipy, which is not installed: pip install 'hpctrain[scaling]'"
        )
