"""Files with which an interrupted packing can be resumed: the plan, and one record per shard.

Both are JSON, next to the shards, and deleted when the manifest is written. A record is valid only for the plan it
was made for, and its shard only if every byte matches the record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from hpctrain.data.format.field_statistics import Moments, moments_of
from hpctrain.data.format.manifest import MANIFEST_NAME, PARTIAL_SUFFIX, FieldSpec, ShardEntry
from hpctrain.data.format.shard_file import record_name
from hpctrain.data.format.token_windows import WINDOWS_NAME
from hpctrain.storage import hash_of, replace_file

PLAN_NAME = ".packing.json"
# Files of a dataset's directory other than shards and their records.
OWN_NAMES = (
    MANIFEST_NAME,
    f".{MANIFEST_NAME}{PARTIAL_SUFFIX}",
    PLAN_NAME,
    f"{PLAN_NAME}{PARTIAL_SUFFIX}",
    WINDOWS_NAME,
    f".{WINDOWS_NAME}{PARTIAL_SUFFIX}",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines the content of a dataset's shards, as JSON. Each record contains its hash."""

    document: Mapping[str, JsonValue]

    @property
    def hash(self) -> str:
        return _hash_of(self.document)

    def difference(self, other: Mapping[str, Any]) -> str:
        """Returns the keys in which another plan differs, with both values, as text; "" if none does."""
        mine = json.loads(json.dumps(self.document))
        keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
        return "; ".join(f"{key} was {_short(other.get(key))}, now {_short(mine.get(key))}" for key in keys)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A finished shard: its entry for the manifest, its fields, and its part of the statistics."""

    entry: ShardEntry
    fields: dict[str, FieldSpec]
    moments: dict[str, Moments]


def make_record(
    entry: ShardEntry, *, fields: Mapping[str, FieldSpec], arrays: Mapping[str, NDArray[Any]]
) -> ShardRecord:
    """Returns the record of a shard just written. Fields with classes have no statistics.

    arrays: of the fields that statistics are computed from; token fields are not among them.
    """
    moments = {
        name: moments_of(array)
        for name, array in arrays.items()
        if name in fields and not fields[name].classes
    }
    return ShardRecord(entry=entry, fields=dict(fields), moments=moments)


def write_plan(directory: Path, plan: Plan) -> None:
    """Writes the plan into `directory`. Raises OSError."""
    _write_json(directory / PLAN_NAME, {"plan": dict(plan.document)})


def read_plan(directory: Path) -> dict[str, Any] | None:
    """Returns the plan of the packing that was interrupted in `directory`; None if it is missing or unreadable."""
    document = _read_json(directory / PLAN_NAME)
    return document["plan"] if document is not None and isinstance(document.get("plan"), dict) else None


def write_record(directory: Path, record: ShardRecord, *, plan: Plan) -> None:
    """Writes the record of a finished shard. Raises OSError."""
    document = {
        "plan": plan.hash,
        "entry": record.entry.model_dump(mode="json"),
        "fields": {name: spec.model_dump(mode="json") for name, spec in record.fields.items()},
        "moments": {name: moments.as_json() for name, moments in record.moments.items()},
    }
    _write_json(directory / record_name(record.entry.file), document)


def read_record(directory: Path, file: str, *, plan: Plan) -> ShardRecord | None:
    """Returns the record of shard `file`; None if it is missing, unreadable, or of another plan."""
    document = _read_json(directory / record_name(file))
    if document is None or document.get("plan") != plan.hash:
        return None
    try:
        record = ShardRecord(
            entry=ShardEntry.model_validate(document["entry"]),
            fields={name: FieldSpec.model_validate(spec) for name, spec in document["fields"].items()},
            moments={name: Moments(**moments) for name, moments in document["moments"].items()},
        )
    except (ValidationError, KeyError, TypeError, AttributeError):
        return None
    return record if record.entry.file == file else None


def _write_json(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name if path.name.startswith('.') else '.' + path.name}{PARTIAL_SUFFIX}")
    # Not durable: if a power failure truncates it, the checksum does not match and the shard is written again.
    content = json.dumps({**document, "checksum": _hash_of(document)})
    replace_file(path, content.encode(), partial=partial)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Returns the document; None if the file is missing, or its checksum does not match."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.pop("checksum", None) != _hash_of(document):
        return None
    return document


def _hash_of(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hash_of(text.encode())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
