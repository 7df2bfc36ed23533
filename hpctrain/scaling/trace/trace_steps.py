"""Parses the recipe's key `telemetry.trace_steps`, which says which steps are traced."""

from __future__ import annotations

TRACE_FOLDER = "trace"  # in the run directory


def parse_trace_steps(text: str) -> tuple[range, ...]:
    """Returns the ranges of steps in a text such as `100-105,2000`.

    The ranges must ascend, with at least one step between two ranges. Raises ValueError for any other text.
    """
    found: list[range] = []
    for part in text.split(","):
        begin, dash, end = (word.strip() for word in part.partition("-"))
        if not begin.isdecimal() or not (end.isdecimal() if dash else True):
            raise ValueError(
                f"{text!r} is not like '100-105,2000': single steps and ranges, separated by commas"
            )
        steps = range(int(begin), int(end or begin) + 1)
        if not steps or steps.start < 1 or (found and steps.start <= found[-1].stop):
            raise ValueError(
                f"{part.strip()!r} in {text!r}: steps count from 1, and ranges must ascend, with at least one step "
                "between two ranges"
            )
        found.append(steps)
    return tuple(found)
