"""Durations in words."""

from __future__ import annotations


def in_words(seconds: float) -> str:
    """Formats a time: `0.12 s`, `45 s`, `12 min`, `3.5 h`, `2 days`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit_s, name in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.0f} s"
