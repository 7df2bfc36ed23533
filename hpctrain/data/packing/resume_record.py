"""What an unfinished packing leaves beside its shards, so that it can go on: the plan, a record a shard.

Both are JSON and go when the manifest is written. A record counts only with the plan it was made for, and its
shard only if every byte is as recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from hpctrain.data.format.field_statistics import Moments, moments_of
from hpctrain.data.format.manifest import MANIFEST_NAME, PARTIAL_SUFFIX, FieldSpec, ShardEntry
from hpctrain.data.format.shard_file import record_name
from hpctrain.data.format.token_windows import WINDOWS_NAME

PLAN_NAME = ".packing.json"
# What a dataset's directory may hold beside shards and their records.
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
    """What decides the content of a dataset's shards, as JSON, and the hash that says so in each record."""

    document: Mapping[str, JsonValue]

    @property
    def hash(self) -> str:
        return _hash_of(self.document)

    def difference(self, other: Mapping[str, Any]) -> str:
        """The keys in which another plan differs, with both values."""
        mine = json.loads(json.dumps(self.document))
        keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
        return "; ".join(f"{key} was {_short(other.get(key))}, now {_short(mine.get(key))}" for key in keys)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A finished shard: its entry for the manifest, its fields, and what the statistics are added up from."""

    entry: ShardEntry
    fields: dict[str, FieldSpec]
    moments: dict[str, Moments]


def make_record(
    entry: ShardEntry, *, fields: Mapping[str, FieldSpec], arrays: Mapping[str, NDArray[Any]]
) -> ShardRecord:
    """The record of a shard just written. Numbers that name something (tokens, classes) have no statistics."""
    moments = {
        name: moments_of(array)
        for name, array in arrays.items()
        if name in fields and not fields[name].classes
    }
    return ShardRecord(entry=entry, fields=dict(fields), moments=moments)


def write_plan(directory: Path, plan: Plan) -> None:
    """Note what is being packed. Raises OSError."""
    _write_json(directory / PLAN_NAME, {"plan": dict(plan.document)})


def read_plan(directory: Path) -> dict[str, Any] | None:
    """The plan of the packing that was interrupted in `directory`; None if there is none to be read."""
    document = _read_json(directory / PLAN_NAME)
    return document["plan"] if document is not None and isinstance(document.get("plan"), dict) else None


def write_record(directory: Path, record: ShardRecord, *, plan: Plan) -> None:
    """Say that a shard is finished. Raises OSError."""
    document = {
        "plan": plan.hash,
        "entry": record.entry.model_dump(mode="json"),
        "fields": {name: spec.model_dump(mode="json") for name, spec in record.fields.items()},
        "moments": {name: moments.as_json() for name, moments in record.moments.items()},
    }
    _write_json(directory / record_name(record.entry.file), document)


def read_record(directory: Path, file: str, *, plan: Plan) -> ShardRecord | None:
    """The record of shard `file`; None if there is none, of this plan, that can be read."""
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
    with partial.open("w", encoding="utf-8") as file:
        # Not synced: one that a power failure cuts short has another checksum, and its shard is made again.
        json.dump({**document, "checksum": _hash_of(document)}, file)
    partial.rename(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    """None if the file is not there, or was not written by `_write_json` as it is."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.pop("checksum", None) != _hash_of(document):
        return None
    return document


def _hash_of(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
