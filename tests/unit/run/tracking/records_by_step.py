"""Records of a run, by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.telemetry import read_records


def newest(run_directory: Path, kind: str, *, rank: int = 0) -> dict[int, dict[str, Any]]:
    """Records by step; of steps that were done twice the later ones."""
    records = read_records(run_directory / f"metrics/rank-{rank:05}.jsonl")
    return {record["step"]: record for record in records if record["kind"] == kind}
