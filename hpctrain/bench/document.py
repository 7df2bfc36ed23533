"""Writes JSON documents of measurements, and their common first fields."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.run import machine_record, versions_record
from hpctrain.telemetry import write_json


def document_head(schema: str, *, commit: str | None) -> dict[str, Any]:
    """Returns the common first fields of a measurement's document.

    schema: `hpctrain.bench.NAME/VERSION`; the version is increased when a field is removed or changes its meaning.
    """
    return {
        "schema": schema,
        "time": time.time(),
        "commit": commit,
        "machine": machine_record(),
        "versions": versions_record(),
    }


def check_writable(path: Path, *, option: str) -> None:
    """Raises UsageError if no file can be written at `path`. Call it before the measurement starts."""
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
    """Writes `document` atomically. Raises UsageError if it cannot be written."""
    try:
        write_json(path, document)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
