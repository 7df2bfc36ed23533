"""Reads the timeline that Horovod writes to HOROVOD_TIMELINE, with times since 1970."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError

# Horovod numbers its tensors from 0 as processes of its trace: they come after the ranks.
_FIRST_PROCESS = 1_000_000
_EPOCH = "start_time_since_epoch_in_micros"


def read_horovod_timeline(path: Path) -> list[dict[str, Any]]:
    """Returns the events with `ts` in microseconds since 1970 by the clock of rank 0's node, where it was written.

    The end may be missing. Raises UsageError if the file cannot be read, or does not say when it began (Horovod before
    0.21). Source of the format: horovod/common/timeline.cc of Horovod 0.28.1.
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
