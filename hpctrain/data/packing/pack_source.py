"""Packs a named source into dataset directories, for `hpctrain data pack`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from hpctrain.comm import Collective, SerialWorld, agreed, on_rank_0
from hpctrain.data.format.manifest import FieldSpec, Manifest
from hpctrain.data.format.manifest_entries import Boundaries
from hpctrain.data.hdf5.encode import ChunkCodec, ShardCompression
from hpctrain.data.packing.directory import check_free
from hpctrain.data.packing.pack import (
    SHARD_BYTES,
    Existing,
    Progress,
    pack_documents,
    pack_iterator,
    pack_rows,
)
from hpctrain.data.sources.registry import ArraySource, IteratorSource, RowSource, SourceOptions, open_source
from hpctrain.data.sources.row_source import ArrayRows
from hpctrain.data.sources.text import TextDocuments, TextSource
from hpctrain.errors import DataError, UsageError

DEFAULT_WINDOW = 128
# Default size of a chunk, which is read and decoded as a whole; smaller ones compress worse.
_CHUNK_BYTES = 1 << 18


def pack_source(
    source: str,
    *,
    out: Path,
    window: int | None = None,
    stride: int | None = None,
    boundaries: Boundaries | None = None,
    shard_bytes: int = SHARD_BYTES,
    held_out: float | None = None,
    seed: int = 0,
    shuffle: bool = False,
    options: SourceOptions | None = None,
    codec: ChunkCodec | None = None,
    chunk_samples: int | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Callable[[Path], Progress] | None = None,
    comm: Collective | None = None,
) -> dict[Path, Manifest]:
    """Packs a source (see `open_source`) into `out`/train and `out`/test, or `out` if nothing is held out.

    window, stride, boundaries: for text sources only; defaults: 128, the window, "ignore".
    codec: compression, None for none. chunk_samples: samples per chunk; default: as many as fill 256 KiB.
    progress: returns the progress callback for a dataset directory. Collective over `comm`, if given.
    Returns dataset directory -> manifest. Raises UsageError or DataError, on all ranks.
    """
    comm = comm or SerialWorld()
    existing = Existing(existing)
    if chunk_samples is not None and codec is None:
        raise UsageError("--chunk-samples is for compressed shards: choose --compress gzip or zstd")
    # An error of one rank is raised on all ranks, since collectives follow.
    opened = agreed(
        comm,
        lambda: open_source(source, held_out=held_out, seed=seed, shuffle=shuffle, options=options),
        os_error=DataError,
    )
    is_text = isinstance(opened, TextSource)
    if not is_text and (window is not None or stride is not None or boundaries is not None):
        raise UsageError(
            f"--window, --stride and --boundaries cut a stream of tokens; the source {source} holds "
            + ("samples" if isinstance(opened, IteratorSource | RowSource) else "arrays")
        )
    parts = ["all"] if isinstance(opened, IteratorSource) else list(opened.parts)
    directories = {part: out if part == "all" else out / part for part in parts}
    on_rank_0(
        comm,
        lambda: _check(out, directories=list(directories.values()), existing=existing),
        os_error=DataError,
    )
    manifests = {}
    for part, directory in directories.items():
        shared: dict[str, Any] = {
            "shard_bytes": shard_bytes,
            "existing": existing,
            "progress": progress(directory) if progress is not None and comm.rank == 0 else None,
            "comm": comm,
        }
        noted: dict[str, JsonValue] = {**opened.attributes, "part": part}
        if codec is not None:
            noted["compression"] = codec.value
        if isinstance(opened, TextSource):
            length = stride or window or DEFAULT_WINDOW
            manifests[directory] = pack_documents(
                directory,
                TextDocuments(opened.parts[part]),
                window=window if window is not None else DEFAULT_WINDOW,
                stride=stride,
                boundaries=boundaries or "ignore",
                compression=_compression(codec, chunk_samples=chunk_samples, sample_bytes=length),
                attributes={**noted, "files": len(opened.parts[part])},
                **shared,
            )
        elif isinstance(opened, IteratorSource):
            # The size of a sample is unknown before the first one was read.
            manifests[directory] = pack_iterator(
                directory,
                opened.open_part,
                num_parts=opened.num_parts,
                compression=_compression(codec, chunk_samples=chunk_samples or 1, sample_bytes=1),
                attributes=noted,
                **shared,
            )
        else:
            rows = (
                ArrayRows(arrays=opened.parts[part], identity=[opened.identity, seed])
                if isinstance(opened, ArraySource)
                else opened.parts[part]
            )
            fields = agreed(comm, lambda rows=rows: rows.fields, os_error=DataError)  # type: ignore[misc]
            manifests[directory] = pack_rows(
                directory,
                rows,
                compression=_compression(
                    codec,
                    chunk_samples=chunk_samples,
                    sample_bytes=max(s.sample_bytes for s in fields.values()),
                ),
                attributes={**noted, **_num_classes(fields)},
                **shared,
            )
    return manifests


def _num_classes(fields: Mapping[str, FieldSpec]) -> dict[str, JsonValue]:
    """Returns the attribute `num_classes`, which tasks read, if exactly one field has named classes."""
    counts = [len(spec.classes) for spec in fields.values() if spec.classes]
    return {"num_classes": counts[0]} if len(counts) == 1 else {}


def _compression(
    codec: ChunkCodec | None, *, chunk_samples: int | None, sample_bytes: int
) -> ShardCompression | None:
    if codec is None:
        return None
    if chunk_samples is None:
        chunk_samples = max(1, _CHUNK_BYTES // sample_bytes)
    return ShardCompression(codec=codec, chunk_samples=chunk_samples)


def _check(out: Path, *, directories: list[Path], existing: Existing) -> None:
    """Raises UsageError if one of the directories may not be written, before any of them is changed."""
    if out not in directories and out.is_dir():
        foreign = sorted(child.name for child in out.iterdir() if child not in directories)
        if foreign:
            raise UsageError(
                f"{out} is not empty ({', '.join(foreign[:5])}): choose another directory for the datasets "
                f"{', '.join(directory.name for directory in directories)}"
            )
    for directory in directories:
        check_free(directory, existing=existing)
