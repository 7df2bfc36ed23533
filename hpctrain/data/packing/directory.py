"""Prepares the directory that a dataset is packed into, and finishes the dataset with its manifest.

During packing, the directory also contains the plan and one record per finished shard. An interrupted packing is
resumed with these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from hpctrain.data.format.manifest import (
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    FieldSpec,
    Kind,
    Manifest,
    ShardEntry,
    TokenWindows,
    read_manifest,
    write_manifest,
)
from hpctrain.data.format.manifest_entries import Moments, moments_of, statistics_of
from hpctrain.data.format.shard_file import is_shard_name, record_name, shard_number
from hpctrain.data.format.token_windows import WINDOWS_NAME, write_windows
from hpctrain.errors import DataError, UsageError
from hpctrain.storage import hash_of, replace_file

# Files with which an interrupted packing can be resumed: the plan, and one record per shard.
#
# Both are JSON, next to the shards, and deleted when the manifest is written. A record is valid only for
# the plan it was made for, and its shard only if every byte matches the record.


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
class PackingSpec:
    """Everything that determines the content of the shards of a dataset that is packed, as JSON values (the plan).

    The record of each finished shard contains the hash of the plan, so that only shards with the same plan are kept
    when packing is resumed.
    """

    document: Mapping[str, JsonValue]

    @property
    def hash(self) -> str:
        return _hash_of(self.document)

    def difference(self, other: Mapping[str, Any]) -> str:
        """Returns in words in which keys another plan of a packing differs from this plan, with both values.

        Returns "" if the plans are equal. `other` is the other plan as JSON values.
        """
        mine = json.loads(json.dumps(self.document))
        keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
        return "; ".join(f"{key} was {_short(other.get(key))}, now {_short(mine.get(key))}" for key in keys)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What is recorded when a shard is finished, and later becomes part of the manifest.

    `entry` is the entry of the shard in the manifest, and `fields` are its fields. `moments` are mean, variance and
    extremes of the values by field name, for the statistics of the dataset.
    """

    entry: ShardEntry
    fields: dict[str, FieldSpec]
    moments: dict[str, Moments]


def make_record(
    entry: ShardEntry, *, fields: Mapping[str, FieldSpec], arrays: Mapping[str, NDArray[Any]]
) -> ShardRecord:
    """Returns the record of a shard that was just written: its manifest entry, and statistics of its values.

    `entry` is the shard's entry for the manifest. `arrays` are the arrays of the shard by field name, from which the
    statistics are computed. Do not pass token fields. Fields with classes get no statistics.
    """
    moments = {
        name: moments_of(array)
        for name, array in arrays.items()
        if name in fields and not fields[name].classes
    }
    return ShardRecord(entry=entry, fields=dict(fields), moments=moments)


def write_plan(directory: Path, plan: PackingSpec) -> None:
    """Writes the plan of a packing to a file in `directory`. Raises OSError.

    The plan contains everything that determines the content of the shards.
    """
    _write_json(directory / PLAN_NAME, {"plan": dict(plan.document)})


def read_plan(directory: Path) -> dict[str, Any] | None:
    """Returns the plan of a packing that was interrupted in `directory`, as JSON values.

    The plan contains everything that determines the content of the shards.

    Returns None if the file of the plan is missing, unreadable or damaged.
    """
    document = _read_json(directory / PLAN_NAME)
    return document["plan"] if document is not None and isinstance(document.get("plan"), dict) else None


def write_record(directory: Path, record: ShardRecord, *, plan: PackingSpec) -> None:
    """Writes the record of a finished shard, and the hash of `plan`, to a file in `directory`. Raises OSError."""
    document = {
        "plan": plan.hash,
        "entry": record.entry.model_dump(mode="json"),
        "fields": {name: spec.model_dump(mode="json") for name, spec in record.fields.items()},
        "moments": {name: moments.as_json() for name, moments in record.moments.items()},
    }
    _write_json(directory / record_name(record.entry.file), document)


def read_record(directory: Path, file: str, *, plan: PackingSpec) -> ShardRecord | None:
    """Returns what was recorded when the shard with file name `file` was finished.

    Returns None if the record is missing, unreadable or damaged, or was made with another plan than `plan`. The plan
    contains everything that determines the content of the shards.
    """
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
    """Returns the JSON document in a file, or None if the file is missing, is not JSON, or has a wrong checksum."""
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


# Prepares the directory that a dataset is packed into, and finishes the dataset with its manifest.


# An attribute that is unknown until a stream was read.
FOUND_WHILE_PACKING = "stream_tokens"


class Existing(str, Enum):
    """What to do if the directory already contains a dataset.

    REFUSE: Raise an error.
    REPLACE: Remove the dataset first.
    RESUME: Continue an interrupted packing with the same plan, or keep a finished dataset with the same plan.
    """

    REFUSE = "refuse"
    REPLACE = "replace"
    RESUME = "resume"  # resume an interrupted packing with the same plan; keep a finished dataset with the same plan


def prepare_directory(
    directory: Path, *, existing: Existing = Existing.REFUSE, plan: PackingSpec | None = None
) -> None:
    """Makes `directory` ready for packing: creates it, removes an old dataset, and writes the plan.

    With REPLACE, the files of the dataset in the directory are removed; other files are never removed. With RESUME, if
    the directory contains files, nothing is removed or written, and `plan` must be equal to the plan of the interrupted
    packing. The plan contains everything that determines the content of the shards.

    Raises UsageError if the directory contains a dataset and `existing` is REFUSE, if it contains other files, or if
    the plans differ. Raises DataError after an error of the filesystem.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = sorted(child.name for child in directory.iterdir())
        if names and existing is Existing.RESUME:
            _check_names(directory, names=names, existing=existing)
            check_resumable(directory, plan=plan or PackingSpec(document={}))
            return
        if names:
            _remove(directory, names=names, existing=existing)
        if plan is not None:
            write_plan(directory, plan)
    except OSError as error:
        raise DataError(f"the directory {directory} cannot be used for a dataset: {error}") from error


def check_free(directory: Path, *, existing: Existing) -> None:
    """Raises an error if `existing` does not allow to pack a dataset into `directory`. Changes nothing.

    The errors are those of `prepare_directory`, but the plan of an interrupted packing is not compared.
    """
    try:
        if not directory.exists():
            return
        names = sorted(child.name for child in directory.iterdir())
    except OSError as error:
        raise DataError(f"the directory {directory} cannot be used for a dataset: {error}") from error
    if names:
        _check_names(directory, names=names, existing=existing)


def _check_names(directory: Path, *, names: list[str], existing: Existing) -> None:
    foreign = [name for name in names if name not in OWN_NAMES and not is_shard_name(name)]
    if foreign:
        raise UsageError(
            f"{directory} holds files that do not belong to a dataset ({', '.join(foreign[:5])}): "
            "choose another directory, since --overwrite does not remove them"
        )
    if Existing(existing) is Existing.REFUSE:
        if MANIFEST_NAME in names:
            raise UsageError(f"{directory} already holds a dataset: choose another directory, or --overwrite")
        raise UsageError(
            f"{directory} already holds an unfinished dataset: choose another directory, --resume or --overwrite"
        )


def _remove(directory: Path, *, names: list[str], existing: Existing) -> None:
    _check_names(directory, names=names, existing=existing)
    # The manifest is deleted first: if this is interrupted, the dataset is seen to be unfinished.
    for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
        (directory / name).unlink()


def check_resumable(directory: Path, *, plan: PackingSpec) -> None:
    """Raises UsageError unless `directory` contains an interrupted packing that has the same plan as `plan`.

    The plan contains everything that determines the content of the shards.
    """
    before = read_plan(directory)
    if before is None:
        raise UsageError(
            f"{directory} holds no packing that can be resumed (no {PLAN_NAME}): use --overwrite"
        )
    if (difference := plan.difference(before)) != "":
        raise UsageError(
            f"{directory} was packed differently ({difference}): use the same options as before, or --overwrite"
        )


def finished_already(directory: Path, *, like: Mapping[str, Any]) -> Manifest | None:
    """Returns the manifest of the dataset in `directory` if its packing has finished, else None.

    Used when a packing is to be resumed. `like` contains the keys and values of the manifest that this packing would
    write, as far as they are known. Raises UsageError if the manifest has other values for these keys. Deletes
    temporary files that the finished packing has left.
    """
    if not (directory / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(directory)
    found = manifest.model_dump(mode="json")
    found["attributes"].pop(FOUND_WHILE_PACKING, None)
    wanted = PackingSpec(document=dict(like))
    if (difference := wanted.difference({key: found.get(key) for key in like})) != "":
        raise UsageError(
            f"{directory} holds another dataset ({difference}): choose another directory, or --overwrite"
        )
    # The packing may have been interrupted after it wrote the manifest.
    _tidy(directory, keep=frozenset(entry.file for entry in manifest.shards))
    return manifest


def finish(
    directory: Path,
    *,
    files: Sequence[str],
    plan: PackingSpec,
    kind: Kind,
    block_bytes: int,
    tokens: TokenWindows | None,
    window_starts: NDArray[np.int64] | None,
    attributes: Mapping[str, JsonValue] | None,
) -> Manifest:
    """Makes the manifest of a dataset from what was recorded for each finished shard, writes it, and returns it.

    The dataset is then complete. `files` are the file names of all shards, in any order. `window_starts` contains, for
    boundaries "split", the index of the first token of each window within its shard: int64, shape (number of samples,);
    else it is None. Raises DataError if this process does not see a shard, if the shards have different fields, or if
    writing fails.
    """
    records = []
    for file in sorted(files, key=shard_number):
        record = read_record(directory, file, plan=plan)
        if record is None or not (directory / file).exists():
            raise DataError(
                f"shard {directory / file} was written by a rank, but rank 0 does not see it: "
                "all ranks must pack into a directory that they share"
            )
        records.append(record)
    fields = _fields_of(records)
    windows = None
    try:
        if window_starts is not None:
            windows = write_windows(window_starts, directory=directory)
        manifest = Manifest(
            kind=kind,
            samples=sum(record.entry.samples for record in records),
            block_bytes=block_bytes,
            fields=fields,
            tokens=tokens,
            windows=windows,
            statistics=statistics_of(record.moments for record in records),
            attributes=dict(attributes or {}),
            shards=tuple(record.entry for record in records),
        )
        write_manifest(manifest, directory=directory)
        _tidy(directory, keep=frozenset(files))
    except OSError as error:
        raise DataError(f"the manifest in {directory} cannot be written: {error}") from error
    return manifest


def _fields_of(records: Sequence[ShardRecord]) -> dict[str, FieldSpec]:
    fields = records[0].fields
    for record in records[1:]:
        for name in {**fields, **record.fields}:
            mine, other = fields.get(name), record.fields.get(name)
            if mine != other:
                raise DataError(
                    f"field {name!r} is {_describe(mine)} in shard {records[0].entry.file}, "
                    f"{_describe(other)} in {record.entry.file}: all samples of a dataset must have the same fields"
                )
    return fields


def _describe(spec: FieldSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {spec.shape}"


def _tidy(directory: Path, *, keep: frozenset[str]) -> None:
    """Deletes files that packing needs only until it has finished, and shards whose file names are not in `keep`.

    These are the plan, the records of finished shards, and partly written files.
    """
    for name in sorted(child.name for child in directory.iterdir()):
        is_left_over = name == PLAN_NAME or (name in OWN_NAMES and name.endswith(PARTIAL_SUFFIX))
        if is_left_over or (is_shard_name(name) and name not in keep):
            (directory / name).unlink(missing_ok=True)
