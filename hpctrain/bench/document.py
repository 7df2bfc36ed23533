"""What every JSON document of a measurement begins with, and how it is written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.run.record import machine_record, versions_record
from hpctrain.telemetry import write_json


def document_head(schema: str, *, commit: str | None) -> dict[str, Any]:
    """schema: `hpctrain.bench.NAME/VERSION`; the version grows when a field changes its meaning or goes."""
    return {
        "schema": schema,
        "time": time.time(),
        "commit": commit,
        "machine": machine_record(),
        "versions": versions_record(),
    }


def check_writable(path: Path, *, option: str) -> None:
    """UsageError unless a file can be made at `path`: to be found out before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise UsageError(f"{option} {path} is a directory: give the name of a file")
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from error


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all. Raises UsageError."""
    try:
        write_json(path, document)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
