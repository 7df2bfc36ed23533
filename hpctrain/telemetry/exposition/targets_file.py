"""The file in which Prometheus finds where a run's endpoints are (`file_sd_configs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from hpctrain.telemetry.records import write_json


@final
class TargetsFile:
    """Sink that passes over all records: its file is there as long as the run. For rank 0.

    targets: `host:port` of each endpoint. labels: of every target. Raises OSError if the file cannot be written.
    """

    name = "file with Prometheus' targets"

    def __init__(self, path: Path, *, targets: Sequence[str], labels: Mapping[str, str]) -> None:
        self._path = path
        write_json(path, [{"targets": list(targets), "labels": dict(labels)}])

    def receive(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
