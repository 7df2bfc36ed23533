"""Packs a dataset: rank 0 prepares the directory, all ranks write shards, rank 0 writes the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.comm import Collective, on_rank_0
from hpctrain.data.format.manifest import Kind, Manifest, TokenWindows
from hpctrain.data.hdf5.encode import ShardCompression
from hpctrain.data.packing.directory import (
    FOUND_WHILE_PACKING,
    Existing,
    finish,
    finished_already,
    prepare_directory,
)
from hpctrain.data.packing.resume_record import Plan
from hpctrain.data.packing.shard_makers import Progress, ShardMaker, make_shards, write_together
from hpctrain.errors import DataError


def write_dataset(
    directory: Path,
    maker: ShardMaker,
    *,
    kind: Kind,
    plan: Mapping[str, JsonValue],
    like: Mapping[str, JsonValue],
    block_bytes: int,
    compression: ShardCompression | None,
    attributes: Callable[[], dict[str, JsonValue]],
    existing: Existing,
    progress: Progress | None,
    comm: Collective,
    windows: TokenWindows | None = None,
    window_starts: NDArray[np.int64] | None = None,
    total: int | None = None,
    nothing: Callable[[], str] | None = None,
) -> Manifest:
    """Packs a dataset and returns its manifest. Collective over `comm`.

    maker: makes this rank's shards. plan: everything that determines their content. like: values that the manifest
    of a finished dataset must have to be kept with RESUME. attributes: called before packing and again after it,
    when the length of a stream is known. total: number of samples, if known. nothing: returns the message of the
    error for a dataset without shards.
    Raises UsageError or DataError on all ranks.
    """
    # A plain string would fail the `is` tests, and the directory would be emptied.
    existing = Existing(existing)
    noted = {key: value for key, value in attributes().items() if key != FOUND_WHILE_PACKING}
    whole_plan = Plan(
        document={
            "kind": kind.value,
            **plan,
            "block_bytes": block_bytes,
            "compression": dict(compression.as_json()) if compression else None,
            "attributes": noted,
        }
    )

    def prepare() -> Any:
        if existing is Existing.RESUME:
            alike = {"kind": kind.value, "block_bytes": block_bytes, "attributes": noted, **like}
            found = finished_already(directory, like=alike)
            if found is not None:
                return found.model_dump(mode="json")
        prepare_directory(directory, existing=existing, plan=whole_plan)
        return None

    finished = on_rank_0(comm, prepare, os_error=DataError)
    if finished is not None:
        return Manifest.model_validate(finished)
    records = make_shards(
        maker, directory=directory, plan=whole_plan, block_bytes=block_bytes, compression=compression
    )
    files = write_together(records, comm=comm, total=total, progress=progress)

    def end() -> Any:
        if not files:
            raise DataError(nothing() if nothing is not None else "there is nothing to pack")
        return finish(
            directory,
            files=files,
            plan=whole_plan,
            kind=kind,
            block_bytes=block_bytes,
            tokens=windows,
            window_starts=window_starts,
            attributes=attributes(),
        ).model_dump(mode="json")

    return Manifest.model_validate(on_rank_0(comm, end, os_error=DataError))
