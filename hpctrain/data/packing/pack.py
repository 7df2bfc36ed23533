"""Packs arrays, token streams and iterators into a dataset directory: shards first, the manifest last.

Functions with a `comm` are collective if it is given: the ranks share the work, and must share the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.comm import Collective, SerialWorld, agreed, check_same
from hpctrain.data.format.manifest import Kind, Manifest, TokenWindows
from hpctrain.data.format.manifest_entries import Boundaries
from hpctrain.data.hdf5.encode import ShardCompression
from hpctrain.data.packing.directory import (
    FOUND_WHILE_PACKING,
    Existing,
    prepare_directory,
)
from hpctrain.data.packing.shard_makers import (
    DOCUMENTS_DATASET,
    DocumentShards,
    Progress,
    RowShards,
    WindowPlan,
    plan_windows,
)
from hpctrain.data.packing.stream_shards import IteratorShards, Sample, StreamShards
from hpctrain.data.packing.token_documents import Documents, check_token_dtype
from hpctrain.data.packing.write_dataset import write_dataset
from hpctrain.data.sources.row_source import ArrayRows, Rows
from hpctrain.errors import DataError, UsageError

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20

__all__ = [
    "BLOCK_BYTES",
    "SHARD_BYTES",
    "Existing",
    "Progress",
    "pack_arrays",
    "pack_documents",
    "pack_iterator",
    "pack_rows",
    "pack_tokens",
    "prepare_directory",
]


def pack_arrays(
    directory: Path | str,
    fields: Mapping[str, NDArray[Any]],
    *,
    shard_bytes: int = SHARD_BYTES,
    shard_samples: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    compression: ShardCompression | None = None,
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
    comm: Collective | None = None,
) -> Manifest:
    """Packs arrays of equal first dimension: field name -> array of shape (num_samples, *sample_shape).

    A shard holds `shard_samples`, or as many samples as fit into `shard_bytes` (at least one). Arrays may be
    memory maps: one shard at a time is held in memory. Collective over `comm`, if given.
    Returns the manifest. Raises DataError if the arrays are not valid fields, UsageError if `existing` does not
    permit what is in the directory.
    """
    return pack_rows(
        directory,
        ArrayRows(arrays=fields),
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        block_bytes=block_bytes,
        compression=compression,
        attributes=attributes,
        existing=existing,
        progress=progress,
        comm=comm,
    )


def pack_rows(
    directory: Path | str,
    rows: Rows,
    *,
    shard_bytes: int = SHARD_BYTES,
    shard_samples: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    compression: ShardCompression | None = None,
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
    comm: Collective | None = None,
) -> Manifest:
    """Packs samples that are read by position; otherwise as `pack_arrays`."""
    comm = comm or SerialWorld()
    fields, identity = agreed(comm, lambda: (rows.fields, rows.identity), os_error=DataError)
    if shard_samples is None:
        shard_samples = max(1, shard_bytes // sum(spec.sample_bytes for spec in fields.values()))
    _check_sizes(shard=shard_samples, block=block_bytes)
    described: JsonValue = {name: spec.model_dump(mode="json") for name, spec in fields.items()}
    check_same(comm, name="the source", value=[rows.num_samples, described], error=DataError)
    return write_dataset(
        Path(directory),
        RowShards(rows, shard_samples=shard_samples, rank=comm.rank, num_ranks=comm.num_ranks),
        kind=Kind.SAMPLES,
        plan={
            "samples": rows.num_samples,
            "fields": described,
            "source": identity,
            "shard_samples": shard_samples,
        },
        like={"samples": rows.num_samples, "fields": described},
        total=rows.num_samples,
        block_bytes=block_bytes,
        compression=compression,
        attributes=lambda: dict(attributes or {}),
        existing=existing,
        progress=progress,
        comm=comm,
    )


def pack_tokens(
    directory: Path | str,
    chunks: Iterable[NDArray[Any]],
    *,
    window: int,
    stride: int | None = None,
    dtype: str = "uint8",
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = BLOCK_BYTES,
    compression: ShardCompression | None = None,
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
) -> Manifest:
    """Packs a stream of tokens; samples are windows of window + 1 tokens that begin `stride` tokens apart.

    chunks: integer arrays of shape (n,), concatenated to the stream; about `shard_bytes` are held in memory.
    stride: `window` unless given, so that each token is predicted once. Tokens after the last whole window
    are dropped (fewer than `stride`). A shard repeats the tokens that its last window shares with the next
    shard, so that every window lies in one file. For one process; `pack_documents` works with several ranks.
    Returns the manifest. Raises DataError if the stream is shorter than one window.
    """
    check_token_dtype(dtype)
    windows = _windows(window=window, stride=stride)
    shard_samples = max(1, windows.windows_in(shard_bytes // np.dtype(dtype).itemsize))
    _check_sizes(shard=shard_bytes, block=block_bytes)
    stream = StreamShards(chunks, windows=windows, dtype=dtype, shard_samples=shard_samples)
    return write_dataset(
        Path(directory),
        stream,
        kind=Kind.TOKENS,
        plan={"tokens": windows.model_dump(mode="json"), "dtype": dtype, "shard_samples": shard_samples},
        like={"tokens": windows.model_dump(mode="json")},
        windows=windows,
        block_bytes=block_bytes,
        compression=compression,
        attributes=lambda: {**(attributes or {}), FOUND_WHILE_PACKING: stream.read_tokens},
        existing=existing,
        progress=progress,
        comm=SerialWorld(),
        nothing=lambda: f"the stream has {stream.read_tokens} tokens, one window takes {window + 1}",
    )


def pack_documents(
    directory: Path | str,
    documents: Documents,
    *,
    window: int,
    stride: int | None = None,
    boundaries: Boundaries = "ignore",
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = BLOCK_BYTES,
    compression: ShardCompression | None = None,
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
    comm: Collective | None = None,
) -> Manifest:
    """Packs concatenated documents, as `pack_tokens` does, and records in each shard where documents begin.

    boundaries: "ignore" cuts windows from the concatenated stream; "split" cuts each document separately, so that
    no window has tokens of two documents. Tokens after a document's last window, and documents shorter than
    window + 1, are then in no sample. Collective over `comm`, if given.
    Returns the manifest. Raises DataError if no window fits.
    """
    comm = comm or SerialWorld()
    windows = _windows(window=window, stride=stride).model_copy(
        update={"boundaries": boundaries, "documents": DOCUMENTS_DATASET}
    )
    _check_sizes(shard=shard_bytes, block=block_bytes)

    def plan() -> tuple[WindowPlan, JsonValue]:
        cut = plan_windows(
            documents,
            window=windows.window,
            stride=windows.stride,
            shard_tokens=shard_bytes // np.dtype(documents.dtype).itemsize,
            split=boundaries == "split",
        )
        return cut, documents.identity

    cut, identity = agreed(comm, plan, os_error=DataError)
    counts = [len(documents.starts) - 1, int(documents.starts[-1])]
    check_same(comm, name="the source", value=counts, error=DataError)
    described = windows.model_dump(mode="json")
    return write_dataset(
        Path(directory),
        DocumentShards(documents, plan=cut, window=window, rank=comm.rank, num_ranks=comm.num_ranks),
        kind=Kind.TOKENS,
        plan={
            "samples": cut.num_samples,
            "tokens": described,
            "dtype": documents.dtype,
            "source": identity,
            "shards": len(cut.first),
        },
        like={"samples": cut.num_samples, "tokens": described},
        windows=windows,
        window_starts=cut.starts,
        total=cut.num_samples,
        block_bytes=block_bytes,
        compression=compression,
        attributes=lambda: {**(attributes or {}), FOUND_WHILE_PACKING: int(documents.starts[-1])},
        existing=existing,
        progress=progress,
        comm=comm,
    )


def pack_iterator(
    directory: Path | str,
    open_part: Callable[[int], Iterator[Sample]],
    *,
    num_parts: int = 1,
    shard_bytes: int = SHARD_BYTES,
    shard_samples: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    compression: ShardCompression | None = None,
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
    comm: Collective | None = None,
) -> Manifest:
    """Packs samples from iterators: dicts of field name -> array or number, with equal dtypes and shapes.

    open_part: returns the iterator over part p, 0 <= p < num_parts; rank r packs the parts p with
    p % num_ranks == r. The dataset depends on num_parts, but not on the number of ranks.
    With Existing.RESUME the iterators run again from the start. Collective over `comm`, if given.
    Returns the manifest. Raises DataError if samples differ in dtype or shape, or an iterator raises an error.
    """
    comm = comm or SerialWorld()
    if num_parts < 1:
        raise UsageError(f"{num_parts} is not a valid number of parts: at least 1 is needed")
    _check_sizes(shard=shard_samples if shard_samples is not None else shard_bytes, block=block_bytes)
    maker = IteratorShards(
        open_part,
        parts=range(comm.rank, num_parts, comm.num_ranks),
        num_parts=num_parts,
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
    )
    return write_dataset(
        Path(directory),
        maker,
        kind=Kind.SAMPLES,
        plan={"parts": num_parts, "shard_bytes": shard_bytes, "shard_samples": shard_samples},
        like={},
        block_bytes=block_bytes,
        compression=compression,
        attributes=lambda: dict(attributes or {}),
        existing=existing,
        progress=progress,
        comm=comm,
        nothing=lambda: "the iterator yields no samples: there is nothing to pack",
    )


def _windows(*, window: int, stride: int | None) -> TokenWindows:
    if window < 1 or (stride is not None and stride < 1):
        raise UsageError(f"window {window} and stride {stride} must be at least 1")
    return TokenWindows(window=window, stride=stride if stride is not None else window)


def _check_sizes(*, shard: int, block: int) -> None:
    if shard < 1 or block < 1:
        raise UsageError(f"shard size {shard} and block size {block} in bytes must both be at least 1")
