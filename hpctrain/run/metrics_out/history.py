"""What the run directory records of earlier starts: how they ended, and how much of their work is done again."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.telemetry import STEP, Value, stop_reason

_TAIL_BYTES = 1 << 20
# Causes in `attempts.jsonl` of attempts that did not fail.
_NO_FAILURES = frozenset({"finished", "wall clock", "preemption", "cancelled"})


def what_the_last_start_left(records: Path, *, step: int) -> dict[str, Any]:
    """Returns how the last start ended, and what of its work this one does again. For rank 0. Raises OSError.

    records: rank 0's. step: from which this start goes on. `stopped`: "signal" or "time_limit", else None. `lost_steps`
    and `lost_s`: the steps beyond `step`, and the time that they took, by the mean of those in the last MiB of the
    records.
    """
    found = list(_newest(records))
    steps = [record for record in found if record["kind"] == STEP]
    last = steps[-1]["step"] if steps else step
    beyond = [record["seconds"]["step"] for record in steps if record["step"] > step] or [0.0]
    lost = max(0, last - step)
    stopped = stop_reason(found[-1]["reason"]) if found and found[-1]["kind"] == "stopped" else None
    return {"stopped": stopped, "lost_steps": lost, "lost_s": lost * sum(beyond) / len(beyond)}


def figures_of_starts(
    starts: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], *, requeues: int
) -> list[Value]:
    """Returns the metrics of all starts of the run: name, labels, value. Pure.

    starts: lines of `starts.jsonl`, the last one this start's. attempts: lines of `attempts.jsonl`; none without a
    supervisor.
    """
    before = [start.get("before") or {} for start in starts]
    stops = Counter(entry["stopped"] for entry in before if entry.get("stopped"))
    failed = Counter(a["cause"] for a in attempts if a.get("cause") and a["cause"] not in _NO_FAILURES)
    attempted = completed = len(starts) - 1
    if attempts:
        # An attempt that has not ended is this start, whose training the supervisor has not seen yet.
        earlier = attempts if attempts[-1].get("ended") is not None else attempts[:-1]
        attempted = len(earlier)
        completed = sum(a.get("training_began") is not None for a in earlier[1:]) + (attempted > 0)
    return [
        ("hpctrain_starts_total", (), len(starts)),
        ("hpctrain_resumes_attempted_total", (), attempted),
        ("hpctrain_resumes_completed_total", (), completed),
        ("hpctrain_requeues_total", (), requeues),
        ("hpctrain_lost_steps_total", (), sum(entry.get("lost_steps", 0) for entry in before)),
        ("hpctrain_lost_seconds_total", (), sum(entry.get("lost_s", 0.0) for entry in before)),
        *(("hpctrain_stops_total", (reason,), count) for reason, count in stops.items()),
        *(("hpctrain_failed_attempts_total", (cause,), count) for cause, count in failed.items()),
    ]


def read_figures_of_starts(directory: Path) -> list[Value]:
    """Returns `figures_of_starts` of a run directory. For rank 0. Lines that cannot be read are passed over."""
    requeues = os.environ.get("SLURM_RESTART_COUNT", "")
    return figures_of_starts(
        _lines(directory / "starts.jsonl"),
        _lines(directory / "attempts.jsonl"),
        requeues=int(requeues) if requeues.isdigit() else 0,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def _newest(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records in the last part of a file, oldest first."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")
    # The first piece may have been cut; the last one is empty.
    for line in lines[1 if start else 0 : -1]:
        with contextlib.suppress(ValueError):
            yield json.loads(line)
