"""Packs arrays, token streams and iterators into a dataset directory: shards first, the manifest last.

Rank 0 prepares the directory, all ranks write shards, and rank 0 writes the manifest.
A function with an argument `comm` is collective over `comm` if `comm` is given. The ranks then share the work, and
must see the same directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.comm import Collective, SerialWorld, agreed, check_same, on_rank_0
from hpctrain.data.format.manifest import FieldSpec, Kind, Manifest, TokenWindows
from hpctrain.data.format.manifest_entries import Boundaries
from hpctrain.data.hdf5.filters import ChunkCodec, ShardCompression, codec_names
from hpctrain.data.packing.directory import (
    FOUND_WHILE_PACKING,
    Existing,
    PackingSpec,
    check_free,
    finish,
    finished_already,
    prepare_directory,
)
from hpctrain.data.packing.shard_makers import (
    DOCUMENTS_DATASET,
    Documents,
    DocumentShards,
    IteratorShards,
    Progress,
    RowShards,
    Sample,
    ShardMaker,
    StreamShards,
    WindowAssignment,
    check_token_dtype,
    make_shards,
    plan_windows,
    write_shards_together,
)
from hpctrain.data.sources.registry import ArraySource, IteratorSource, RowSource, SourceOptions, open_source
from hpctrain.data.sources.row_source import ArrayRows, SampleRows
from hpctrain.data.sources.text import TextDocuments, TextSource
from hpctrain.errors import DataError, UsageError

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Options that all functions which pack a dataset have. Their meaning is documented at `pack_arrays`."""

    shard_bytes: int = SHARD_BYTES
    shard_samples: int | None = None
    block_bytes: int = BLOCK_BYTES
    compression: ShardCompression | None = None
    attributes: Mapping[str, JsonValue] | None = None
    existing: Existing = Existing.REFUSE
    progress: Progress | None = None
    comm: Collective | None = None

    @property
    def ranks(self) -> Collective:
        """The ranks that share the work: `comm`, or only this process if `comm` is None."""
        return self.comm or SerialWorld()


def _write_dataset(
    directory: Path | str,
    maker: ShardMaker,
    *,
    plan: Mapping[str, JsonValue],
    options: PackOptions,
    windows: TokenWindows | None = None,
    window_starts: NDArray[np.int64] | None = None,
    total: int | None = None,
    stream_tokens: Callable[[], int] | None = None,
    nothing: Callable[[], str] | None = None,
) -> Manifest:
    """Packs a dataset and returns its manifest. Collective over `options.ranks`.

    Rank 0 prepares the directory. Each rank writes the shards that its `maker` makes. Then rank 0 writes the manifest.
    Raises UsageError or DataError on all ranks.

    Args:
        directory: Directory of the new dataset.
        maker: Makes the shards of this rank.
        plan: What determines the content of the shards, apart from `options` and `windows`. With `Existing.RESUME` a
            finished dataset is kept if its manifest has the same values for the keys that both contain.
        options: Options of the packing.
        windows: How a token stream is cut into windows; None: the samples are not token windows.
        window_starts: Index of the first token of each window within the window's shard: int64, shape (num_samples,).
            None if windows are a fixed number of tokens apart.
        total: Number of samples of the dataset; None: unknown.
        stream_tokens: Function that returns the number of tokens of the stream. It is called after the stream was read.
        nothing: Function that returns the message of the error that is raised if there is nothing to pack.
    """
    directory, comm = Path(directory), options.ranks
    # A plain string would fail the `is` tests, and the directory would be emptied.
    existing = Existing(options.existing)
    kind = Kind.SAMPLES if windows is None else Kind.TOKENS
    attributes = dict(options.attributes or {})
    whole_plan = PackingSpec(
        document={
            "kind": kind.value,
            **plan,
            **({} if windows is None else {"tokens": windows.model_dump(mode="json")}),
            "block_bytes": options.block_bytes,
            "compression": dict(options.compression.as_json()) if options.compression else None,
            "attributes": {key: value for key, value in attributes.items() if key != FOUND_WHILE_PACKING},
        }
    )

    def prepare() -> Any:
        if existing is Existing.RESUME:
            in_manifest = {
                key: value for key, value in whole_plan.document.items() if key in Manifest.model_fields
            }
            found = finished_already(directory, like=in_manifest)
            if found is not None:
                return found.model_dump(mode="json")
        prepare_directory(directory, existing=existing, plan=whole_plan)
        return None

    finished = on_rank_0(comm, prepare, os_error=DataError)
    if finished is not None:
        return Manifest.model_validate(finished)
    records = make_shards(
        maker,
        directory=directory,
        plan=whole_plan,
        block_bytes=options.block_bytes,
        compression=options.compression,
    )
    files = write_shards_together(records, comm=comm, total=total, progress=options.progress)

    def end() -> Any:
        if not files:
            raise DataError(nothing() if nothing is not None else "there is nothing to pack")
        if stream_tokens is not None:
            attributes[FOUND_WHILE_PACKING] = stream_tokens()
        return finish(
            directory,
            files=files,
            plan=whole_plan,
            kind=kind,
            block_bytes=options.block_bytes,
            tokens=windows,
            window_starts=window_starts,
            attributes=attributes,
        ).model_dump(mode="json")

    return Manifest.model_validate(on_rank_0(comm, end, os_error=DataError))


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
    """Packs arrays into a dataset directory.

    Collective over `comm` if `comm` is given. The ranks then share the work, and must see the same directory. Arrays
    may be memory maps: each rank holds one shard at a time in memory.

    Args:
        directory: Directory of the new dataset.
        fields: For each field an array of shape (num_samples, *sample_shape), the same on every rank.
        shard_bytes: Maximum size of a shard in bytes, before compression. A shard contains at least one sample.
        shard_samples: Number of samples per shard; None: as many as fit into `shard_bytes`.
        block_bytes: Size of the hashed blocks, in bytes.
        compression: How the shards are compressed; None: not at all.
        attributes: Facts to record in the manifest as JSON values, such as the number of classes.
        existing: What to do if the directory already contains a dataset: refuse, replace it, or resume.
        progress: Called on rank 0 with the number of samples packed so far, and with their total number. None: not
            called.
        comm: The ranks that share the work; None: only this process.

    Returns:
        The manifest of the new dataset.

    Raises:
        DataError: If the arrays are not valid fields, or if a file cannot be written.
        UsageError: If the directory contains files, and `existing` does not allow to pack into it.
    """
    options = PackOptions(
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        block_bytes=block_bytes,
        compression=compression,
        attributes=attributes,
        existing=existing,
        progress=progress,
        comm=comm,
    )
    return pack_rows(directory, ArrayRows(arrays=fields), options=options)


def pack_rows(directory: Path | str, rows: SampleRows, *, options: PackOptions) -> Manifest:
    """Packs the samples of `rows`, which are read by position, as `pack_arrays` does. Returns the manifest."""
    comm, shard_samples = options.ranks, options.shard_samples
    fields, identity = agreed(comm, lambda: (rows.fields, rows.identity), os_error=DataError)
    if shard_samples is None:
        shard_samples = max(1, options.shard_bytes // sum(spec.sample_bytes for spec in fields.values()))
    _check_sizes(shard=shard_samples, block=options.block_bytes)
    described: JsonValue = {name: spec.model_dump(mode="json") for name, spec in fields.items()}
    check_same(comm, name="the source", value=[rows.num_samples, described], error=DataError)
    return _write_dataset(
        directory,
        RowShards(rows, shard_samples=shard_samples, rank=comm.rank, num_ranks=comm.num_ranks),
        plan={
            "samples": rows.num_samples,
            "fields": described,
            "source": identity,
            "shard_samples": shard_samples,
        },
        options=options,
        total=rows.num_samples,
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
    """Packs a stream of tokens as windows of window + 1 tokens. Each window is a sample. For one process.

    Fewer than `stride` tokens, those after the last whole window, are dropped. Tokens that the last window of a shard
    shares with the first window of the next shard are stored in both, so that every window lies in one file.

    Args:
        directory: Directory of the new dataset.
        chunks: The parts of the stream in order: integer arrays of shape (n,). About `shard_bytes` bytes of the stream
            are held in memory.
        window: Number of tokens that are predicted in a sample.
        stride: Number of tokens from the start of a window to the start of the next; None: `window`, so that each
            token is predicted once.
        dtype: Name of the numpy dtype in which tokens are stored: "uint8", "uint16" or "int32".
        shard_bytes: Approximate size of a shard in bytes, before compression.
        block_bytes: Size of the hashed blocks, in bytes.
        compression: How the shards are compressed; None: not at all.
        attributes: Facts to record in the manifest as JSON values.
        existing: What to do if the directory already contains a dataset.
        progress: Called with the number of samples packed so far, and with None, since their total number is unknown.

    Returns:
        The manifest of the new dataset.

    Raises:
        DataError: If the stream is shorter than one window, if tokens do not fit the dtype, or if a file cannot be
            written.
        UsageError: If `existing` does not allow to pack into a directory with files, or if a size is invalid.
    """
    check_token_dtype(dtype)
    windows = _windows(window=window, stride=stride)
    shard_samples = max(1, windows.windows_in(shard_bytes // np.dtype(dtype).itemsize))
    _check_sizes(shard=shard_bytes, block=block_bytes)
    stream = StreamShards(chunks, windows=windows, dtype=dtype, shard_samples=shard_samples)
    return _write_dataset(
        directory,
        stream,
        plan={"dtype": dtype, "shard_samples": shard_samples},
        options=PackOptions(
            block_bytes=block_bytes,
            compression=compression,
            attributes=attributes,
            existing=existing,
            progress=progress,
        ),
        windows=windows,
        stream_tokens=lambda: stream.read_tokens,
        nothing=lambda: f"the stream has {stream.read_tokens} tokens, one window takes {window + 1}",
    )


def pack_documents(
    directory: Path | str,
    documents: Documents,
    *,
    window: int,
    stride: int | None = None,
    boundaries: Boundaries = "ignore",
    options: PackOptions,
) -> Manifest:
    """Packs concatenated documents as token windows, and records in each shard where documents begin.

    Collective over `options.ranks`. With `boundaries="ignore"` windows are cut from the concatenated stream. With
    "split" no window contains tokens of two documents. Then no sample contains the tokens after the last window of a
    document, or a document shorter than window + 1 tokens. The other arguments are those of `pack_tokens`. Returns the
    manifest. Raises DataError if no window fits into the stream, or with "split" into any document.
    """
    comm = options.ranks
    windows = _windows(window=window, stride=stride).model_copy(
        update={"boundaries": boundaries, "documents": DOCUMENTS_DATASET}
    )
    _check_sizes(shard=options.shard_bytes, block=options.block_bytes)

    def plan() -> tuple[WindowAssignment, JsonValue]:
        cut = plan_windows(
            documents,
            window=windows.window,
            stride=windows.stride,
            shard_tokens=options.shard_bytes // np.dtype(documents.dtype).itemsize,
            split=boundaries == "split",
        )
        return cut, documents.identity

    cut, identity = agreed(comm, plan, os_error=DataError)
    num_documents, num_tokens = len(documents.starts) - 1, int(documents.starts[-1])
    check_same(comm, name="the source", value=[num_documents, num_tokens], error=DataError)
    return _write_dataset(
        directory,
        DocumentShards(documents, plan=cut, window=window, rank=comm.rank, num_ranks=comm.num_ranks),
        plan={
            "samples": cut.num_samples,
            "dtype": documents.dtype,
            "source": identity,
            "shards": len(cut.first),
        },
        options=options,
        windows=windows,
        window_starts=cut.starts,
        total=cut.num_samples,
        stream_tokens=lambda: num_tokens,
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
    """Packs samples that iterators yield. A sample is a dict of arrays and numbers by field name.

    All samples must have the same fields, dtypes and shapes. Collective over `comm` if `comm` is given. The dataset
    depends on `num_parts`, but not on the number of ranks.

    Args:
        directory: Directory of the new dataset.
        open_part: Function that takes the index p of a part, 0 <= p < num_parts, and returns an iterator over the
            samples of that part. Rank r packs the parts p with p % num_ranks == r. With Existing.RESUME the iterators
            run again from the start.
        num_parts: Number of parts.
        shard_bytes: Maximum size of a shard in bytes, before compression. A shard contains at least one sample.
        shard_samples: Number of samples per shard; None: as many as fit into `shard_bytes`.
        block_bytes: Size of the hashed blocks, in bytes.
        compression: How the shards are compressed; None: not at all.
        attributes: Facts to record in the manifest as JSON values.
        existing: What to do if the directory already contains a dataset.
        progress: Called on rank 0 with the number of samples packed so far, and with None, since their total number
            is unknown.
        comm: The ranks that share the work; None: only this process.

    Returns:
        The manifest of the new dataset.

    Raises:
        DataError: On all ranks, if samples differ in fields, dtype or shape, if an iterator raises an error, or if a
            file cannot be written.
        UsageError: As of `pack_arrays`, on all ranks.
    """
    options = PackOptions(
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        block_bytes=block_bytes,
        compression=compression,
        attributes=attributes,
        existing=existing,
        progress=progress,
        comm=comm,
    )
    return _pack_parts(directory, open_part, num_parts=num_parts, options=options)


def _pack_parts(
    directory: Path | str,
    open_part: Callable[[int], Iterator[Sample]],
    *,
    num_parts: int,
    options: PackOptions,
) -> Manifest:
    comm, shard_bytes, shard_samples = options.ranks, options.shard_bytes, options.shard_samples
    if num_parts < 1:
        raise UsageError(f"{num_parts} is not a valid number of parts: at least 1 is needed")
    _check_sizes(shard=shard_samples if shard_samples is not None else shard_bytes, block=options.block_bytes)
    maker = IteratorShards(
        open_part,
        parts=range(comm.rank, num_parts, comm.num_ranks),
        num_parts=num_parts,
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
    )
    return _write_dataset(
        directory,
        maker,
        plan={"parts": num_parts, "shard_bytes": shard_bytes, "shard_samples": shard_samples},
        options=options,
        nothing=lambda: "the iterator yields no samples: there is nothing to pack",
    )


def _windows(*, window: int, stride: int | None) -> TokenWindows:
    if window < 1 or (stride is not None and stride < 1):
        raise UsageError(f"window {window} and stride {stride} must be at least 1")
    return TokenWindows(window=window, stride=stride if stride is not None else window)


def _check_sizes(*, shard: int, block: int) -> None:
    if shard < 1 or block < 1:
        raise UsageError(f"the shard size {shard} and the block size {block} must both be at least 1")


# Packs a named source into dataset directories, for `hpctrain data pack`.


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
    """Packs a source that is given by its name, as `hpctrain data pack` does. Collective over `comm` if given.

    Writes the datasets `out`/train and `out`/test. If no samples are held out for a test, writes one dataset, `out`.

    Args:
        source: Name of the source, such as a directory of images; see `hpctrain data pack --help`.
        out: Directory of the new dataset or datasets.
        window: For text, number of tokens that are predicted in a sample; None: 128.
        stride: For text, number of tokens from the start of a window to the start of the next; None: `window`.
        boundaries: For text, whether a window may contain tokens of several documents ("ignore") or not ("split");
            None: "ignore".
        shard_bytes: Approximate size of a shard in bytes, before compression.
        held_out: Fraction of the samples or files that go into the dataset `test`; None: the default of the source.
        seed: Seed of the division into train and test, and of `shuffle`.
        shuffle: True: pack the samples in random order. False: in the order of the source.
        options: Options that apply to some sources only.
        codec: How the shards are compressed; None: not at all.
        chunk_samples: Number of samples per compressed chunk; None: as many as fit into 256 KiB.
        existing: What to do if a directory already contains a dataset.
        progress: Function that takes the directory of a dataset and returns the progress callback for that dataset.
        comm: The ranks that share the work; None: only this process.

    Returns:
        The manifest of each dataset, by its directory.

    Raises:
        UsageError: On all ranks, for an unknown source or an invalid option.
        DataError: On all ranks, if the source cannot be read or the dataset cannot be written.
    """
    comm = comm or SerialWorld()
    existing = Existing(existing)
    if chunk_samples is not None and codec is None:
        raise UsageError(f"--chunk-samples is for compressed shards: choose --compress {codec_names()}")
    # An error of one rank is raised on all ranks, since collectives follow.
    opened = agreed(
        comm,
        lambda: open_source(source, held_out=held_out, seed=seed, shuffle=shuffle, options=options),
        os_error=DataError,
    )
    is_text = isinstance(opened, TextSource)
    if not is_text and (window is not None or stride is not None or boundaries is not None):
        raise UsageError(
            f"--window, --stride and --boundaries are only for streams of tokens; the source {source} holds "
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
        attributes: dict[str, JsonValue] = {**opened.attributes, "part": part}
        if codec is not None:
            attributes["compression"] = codec.value
        pack: Callable[..., Manifest]
        sample_bytes: int | None
        if isinstance(opened, TextSource):
            documents = TextDocuments(opened.parts[part])
            attributes["files"] = len(opened.parts[part])
            sample_bytes = stride or window or DEFAULT_WINDOW
            pack = partial(
                pack_documents,
                directory,
                documents,
                window=window if window is not None else DEFAULT_WINDOW,
                stride=stride,
                boundaries=boundaries or "ignore",
            )
        elif isinstance(opened, IteratorSource):
            sample_bytes = None  # unknown before the first sample was read
            pack = partial(_pack_parts, directory, opened.open_part, num_parts=opened.num_parts)
        else:
            rows = (
                ArrayRows(arrays=opened.parts[part], identity=[opened.identity, seed])
                if isinstance(opened, ArraySource)
                else opened.parts[part]
            )
            fields = agreed(comm, lambda rows=rows: rows.fields, os_error=DataError)  # type: ignore[misc]
            attributes.update(_num_classes(fields))
            sample_bytes = max(spec.sample_bytes for spec in fields.values())
            pack = partial(pack_rows, directory, rows)
        manifests[directory] = pack(
            options=PackOptions(
                shard_bytes=shard_bytes,
                compression=_compression(codec, chunk_samples=chunk_samples, sample_bytes=sample_bytes),
                attributes=attributes,
                existing=existing,
                progress=progress(directory) if progress is not None and comm.rank == 0 else None,
                comm=comm,
            )
        )
    return manifests


def _num_classes(fields: Mapping[str, FieldSpec]) -> dict[str, JsonValue]:
    """Returns the dataset's attribute `num_classes`, which tasks read, if one field has class names; else {}."""
    counts = [len(spec.classes) for spec in fields.values() if spec.classes]
    return {"num_classes": counts[0]} if len(counts) == 1 else {}


def _compression(
    codec: ChunkCodec | None, *, chunk_samples: int | None, sample_bytes: int | None
) -> ShardCompression | None:
    if codec is None:
        return None
    if chunk_samples is None:
        chunk_samples = 1 if sample_bytes is None else max(1, _CHUNK_BYTES // sample_bytes)
    return ShardCompression(codec=codec, chunk_samples=chunk_samples)


def _check(out: Path, *, directories: list[Path], existing: Existing) -> None:
    """Raises UsageError if `directories`, in `out`, have files that forbid packing. Call it before anything changes."""
    if out not in directories and out.is_dir():
        foreign = sorted(child.name for child in out.iterdir() if child not in directories)
        if foreign:
            raise UsageError(
                f"{out} is not empty ({', '.join(foreign[:5])}): choose another directory for the datasets "
                f"{', '.join(directory.name for directory in directories)}"
            )
    for directory in directories:
        check_free(directory, existing=existing)
