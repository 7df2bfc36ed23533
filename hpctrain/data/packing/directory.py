"""Prepares the directory that a dataset is packed into, and finishes the dataset with its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.format.field_statistics import statistics_of
from hpctrain.data.format.manifest import (
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    FieldSpec,
    Kind,
    Manifest,
    TokenWindows,
    read_manifest,
    write_manifest,
)
from hpctrain.data.format.shard_file import is_shard_name, shard_number
from hpctrain.data.format.token_windows import write_windows
from hpctrain.data.packing.resume_record import (
    OWN_NAMES,
    PLAN_NAME,
    Plan,
    ShardRecord,
    read_plan,
    read_record,
    write_plan,
)
from hpctrain.errors import DataError, UsageError

# An attribute that is unknown until a stream was read.
FOUND_WHILE_PACKING = "stream_tokens"


class Existing(str, Enum):
    """What to do with a dataset that already exists."""

    REFUSE = "refuse"
    REPLACE = "replace"
    RESUME = "resume"  # resume an interrupted packing with the same plan; keep a finished dataset with the same plan


def prepare_directory(
    directory: Path, *, existing: Existing = Existing.REFUSE, plan: Plan | None = None
) -> None:
    """Makes `directory`, or removes a dataset that may be replaced. Removes only files of a dataset.

    plan: written into the directory; with RESUME it must be that of the interrupted packing.
    Raises UsageError if `existing` does not permit it, the directory has other files, or the plan is another one;
    DataError after an error of the filesystem.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = sorted(child.name for child in directory.iterdir())
        if names and existing is Existing.RESUME:
            _check_names(directory, names=names, existing=existing)
            check_resumable(directory, plan=plan or Plan(document={}))
            return
        if names:
            _remove(directory, names=names, existing=existing)
        if plan is not None:
            write_plan(directory, plan)
    except OSError as error:
        raise DataError(f"the directory {directory} cannot be used for a dataset: {error}") from error


def check_free(directory: Path, *, existing: Existing) -> None:
    """Raises the errors of `prepare_directory`, but changes nothing. Does not compare plans (RESUME)."""
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
            "choose another directory, they are not removed"
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


def check_resumable(directory: Path, *, plan: Plan) -> None:
    """Raises UsageError unless `directory` holds an interrupted packing with `plan`."""
    before = read_plan(directory)
    if before is None:
        raise UsageError(
            f"{directory} holds no packing that can be resumed (no {PLAN_NAME}): use --overwrite"
        )
    if (difference := plan.difference(before)) != "":
        raise UsageError(f"{directory} was packed differently ({difference}): pack as before, or --overwrite")


def finished_already(directory: Path, *, like: Mapping[str, Any]) -> Manifest | None:
    """Returns the manifest if the dataset in `directory` is finished already, for RESUME; None if it is not.

    like: keys of the manifest's JSON, with the values that this packing would write.
    Raises UsageError if the manifest has other values.
    """
    if not (directory / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(directory)
    found = manifest.model_dump(mode="json")
    found["attributes"].pop(FOUND_WHILE_PACKING, None)
    wanted = Plan(document=dict(like))
    if (difference := wanted.difference({key: found.get(key) for key in like})) != "":
        raise UsageError(f"{directory} holds another dataset ({difference}): choose another, or --overwrite")
    # The packing may have been interrupted after it wrote the manifest.
    _tidy(directory, keep=frozenset(entry.file for entry in manifest.shards))
    return manifest


def finish(
    directory: Path,
    *,
    files: Sequence[str],
    plan: Plan,
    kind: Kind,
    block_bytes: int,
    tokens: TokenWindows | None,
    window_starts: NDArray[np.int64] | None,
    attributes: Mapping[str, JsonValue] | None,
) -> Manifest:
    """Writes the manifest from the records of the shards, which makes the dataset valid. Returns it.

    files: names of all shards, in any order. window_starts: for boundaries "split", int64, shape (samples,).
    Raises DataError if this process does not see a shard, the shards have different fields, or writing fails.
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
                    f"{_describe(other)} in {record.entry.file}: samples of a dataset have the same fields"
                )
    return fields


def _describe(spec: FieldSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {spec.shape}"


def _tidy(directory: Path, *, keep: frozenset[str]) -> None:
    """Deletes the plan, the records, and shards that are not in `keep`."""
    for name in sorted(child.name for child in directory.iterdir()):
        is_left_over = name == PLAN_NAME or (name in OWN_NAMES and name.endswith(PARTIAL_SUFFIX))
        if is_left_over or (is_shard_name(name) and name not in keep):
            (directory / name).unlink(missing_ok=True)
