"""Reads the spans that the ranks wrote of traced steps, and puts them on rank 0's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.scaling.trace.trace_steps import TRACE_FOLDER
from hpctrain.telemetry import read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """begin_s, end_s: seconds since 1970 by rank 0's clock. bucket: whose reduction it is; None: of the main thread."""

    step: int
    name: str
    begin_s: float
    end_s: float
    bucket: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The spans of one rank in one range of steps. error_s: how far they may be off rank 0's clock."""

    rank: int
    node: str
    spans: tuple[Span, ...]
    error_s: float


def read_traces(directory: Path) -> list[RankTrace]:
    """Returns what all ranks of the run in `directory` traced, of every range of steps.

    Raises UsageError if there is none, or if it cannot be read.
    """
    folders = sorted((directory / TRACE_FOLDER).glob("step-*"))
    found = [trace for folder in folders for trace in _read_range(folder)]
    if not found:
        raise UsageError(
            f"{directory} has no trace: set telemetry.trace_steps in the recipe, as '100-105', and run these steps"
        )
    return found


def _read_range(folder: Path) -> list[RankTrace]:
    first = folder / "rank-00000.jsonl"
    try:
        of_rank_0 = list(read_records(first))
        head = of_rank_0[0]
        # From rank 0's monotonic clock to seconds since 1970.
        epoch_s = head["time"] - head["clock_s"]
        paths = [folder / f"rank-{rank:05}.jsonl" for rank in range(head["ranks"])]
        records = [of_rank_0, *(list(read_records(path)) for path in paths[1:])]
        return [_on_rank_0s_clock(lines, epoch_s=epoch_s) for lines in records]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"the trace in {folder} cannot be read ({type(error).__name__}: {error}): a rank that was killed leaves it "
            "incomplete; trace the steps again, or remove the folder"
        ) from error


def _on_rank_0s_clock(records: Sequence[dict[str, Any]], *, epoch_s: float) -> RankTrace:
    head = records[0]
    clocks = [record for record in records if record["kind"] == "clock"]
    at_s = [clock["clock_s"] for clock in clocks]
    offsets_s = [clock["offset_s"] for clock in clocks]

    def shared(clock_s: float) -> float:
        # Clocks drift in proportion to time: linear between the comparisons before and after.
        return clock_s + float(np.interp(clock_s, at_s, offsets_s)) + epoch_s

    spans = tuple(
        Span(
            step=record["step"], name=record["name"], begin_s=shared(record["begin_s"]),
            end_s=shared(record["end_s"]), bucket=record.get("bucket"),
        )
        for record in records
        if record["kind"] == "span"
    )  # fmt: skip
    error_s = max(clock["error_s"] for clock in clocks)
    return RankTrace(rank=head["rank"], node=head["node"], spans=spans, error_s=error_s)
