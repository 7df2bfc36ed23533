"""Makes a dataset of existing HDF5 files: a manifest that lists where the samples are, without a copy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm import Collective, SerialWorld, agreed, all_gather_json, on_rank_0
from hpctrain.data.format.manifest import (
    MANIFEST_NAME,
    TOKENS_FIELD,
    TYPES_CHECKED,
    Decoding,
    FieldSpec,
    FieldStatistics,
    Kind,
    Manifest,
    ShardEntry,
    StoredField,
    TokenWindows,
    WindowList,
    read_manifest,
    write_manifest,
)
from hpctrain.data.format.manifest_entries import Moments, decode_values as decode_values
from hpctrain.data.format.token_windows import split_windows, write_windows
from hpctrain.data.hdf5.layout import read_elements
from hpctrain.data.indexing.compare_samples import SampleComparison
from hpctrain.data.indexing.content_hashes import HashedContent, read_content
from hpctrain.data.indexing.decoding_choice import (
    FieldSource,
    ValuesWarning,
    all_places,
    choose_decoding,
    combine,
    num_samples,
    packing_of,
)
from hpctrain.data.indexing.inspect_file import FoundFile, inspect_file, open_to_index
from hpctrain.data.indexing.request import (
    Decode,
    FieldRequest,
    SampleIs,
    find_files,
    parse_decode,
    parse_field_paths,
    parse_missing,
    resolve,
    sample_is,
)
from hpctrain.data.order.epoch_order import rank_share
from hpctrain.errors import DataError, UsageError

# Divides work on many files among the ranks, and returns all results on all ranks.


Item = TypeVar("Item")
Progress = Callable[[int, int | None], None]
"""Called with (done, total) items of this rank's part."""


def share_work(
    comm: Collective,
    items: Sequence[Item],
    function: Callable[[Item], dict[str, Any]],
    *,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Calls `function` for each item on one of the ranks, and returns all results, in order. Collective over `comm`.

    The items must be the same on all ranks; `function` returns JSON values. An error is raised on all ranks.
    """
    share = rank_share(0, len(items), rank=comm.rank, num_ranks=comm.num_ranks)

    def work() -> list[dict[str, Any]]:
        done = []
        for item in items[share.start : share.stop]:
            done.append(function(item))
            if progress is not None:
                progress(len(done), share.stop - share.start)
        return done

    part = agreed(comm, work, os_error=DataError)
    if comm.num_ranks == 1:
        return part
    return [result for found in all_gather_json(comm, part) for result in found]


# Token windows of indexed files: the number of windows per file, and their starts if documents split them.


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """Cut the rows of the files into token windows.

    Raises UsageError if `window` or `stride` is below 1.

    Attributes:
        window: Number of tokens that a sample predicts; a sample has window + 1 tokens.
        stride: Number of tokens from the start of a window to the start of the next.
        documents: Path of a dataset in each file with the positions at which documents begin; no window crosses
            them. None: windows may cross the borders of documents.
    """

    window: int
    stride: int
    documents: str | None = None

    def __post_init__(self) -> None:
        if self.window < 1 or self.stride < 1:
            raise UsageError(f"windows of {self.window} tokens, {self.stride} apart: both must be at least 1")

    @property
    def windows(self) -> TokenWindows:
        boundaries = "ignore" if self.documents is None else "split"
        return TokenWindows.model_validate(
            {
                "window": self.window,
                "stride": self.stride,
                "boundaries": boundaries,
                "documents": self.documents,
            }
        )


def check_token_request(requests: Sequence[FieldRequest], *, samples: SampleIs) -> None:
    """Raises UsageError unless there is one field, named `tokens`, whose rows are the stream."""
    if [request.name for request in requests] != [TOKENS_FIELD]:
        raise UsageError(
            f"--tokens needs exactly one field, named {TOKENS_FIELD}: --fields {TOKENS_FIELD}=/PATH"
        )
    if samples is not SampleIs.ROWS or requests[0].has_wildcard:
        raise UsageError("--tokens cuts each file's stream into samples: no '*' in the path, no --samples")


@dataclass(frozen=True, kw_only=True)
class CutStream:
    """The samples of one file, or of a group of a file.

    `num_tokens` is the length of the part of the stream that windows use, 0 without token windows. `starts`
    contains the first token of each window, int64, shape (samples,), if windows are split at documents; else it is
    None.
    """

    place: FieldSource
    samples: int
    num_tokens: int
    starts: NDArray[np.int64] | None


def token_field(places: Sequence[FieldSource], *, spec: FieldSpec, request: TokenRequest) -> FieldSpec:
    """Returns the field of token windows, given the field `spec` of the streams' rows.

    Raises DataError unless the rows are integers.
    """
    if spec.shape or spec.kind != "array" or np.dtype(spec.dtype).kind not in "iu":
        raise DataError(
            f"{places[0].describe(TOKENS_FIELD)} is {spec.dtype} with rows of shape {spec.shape}, not a stream of "
            "integers: without --tokens its rows are the samples"
        )
    return FieldSpec(dtype=spec.dtype, shape=(request.window + 1,))


def cut_stream(place: FieldSource, *, request: TokenRequest) -> CutStream:
    """Returns the windows of one file, none if it is shorter than one window. Raises DataError."""
    num_tokens = place.fields[TOKENS_FIELD].shape[0]
    windows = request.windows
    if request.documents is None:
        samples = windows.windows_in(num_tokens)
        used = windows.tokens_for(samples) if samples else 0
        return CutStream(place=place, samples=samples, num_tokens=used, starts=None)
    documents = _documents(place.file.path, request.documents, num_tokens=num_tokens)
    starts = split_windows(documents, num_tokens=num_tokens, window=request.window, stride=request.stride)
    return CutStream(place=place, samples=len(starts), num_tokens=num_tokens, starts=starts)


def _documents(path: str, name: str, *, num_tokens: int) -> NDArray[np.int64]:
    with open_to_index(path) as file:
        dataset = file[resolve(file, name)]
        shape, dtype = getattr(dataset, "shape", None), getattr(dataset, "dtype", None)
        if shape is None or len(shape) != 1 or dtype is None or dtype.kind not in "iu":
            raise DataError(
                f"{name} of {path} must be a list of integers, the positions at which documents begin"
            )
        starts: NDArray[np.int64] = read_elements(dataset).astype(np.int64)
    if len(starts) and (np.any(np.diff(starts) < 0) or starts[0] < 0 or starts[-1] > num_tokens):
        raise DataError(
            f"{name} of {path} must hold the positions at which documents begin, ascending, from 0 to {num_tokens}"
        )
    return starts


# Makes a dataset of existing HDF5 files.


BLOCK_BYTES = 1 << 20


class IndexReading(str, Enum):
    """What indexing reads. HEADERS: no samples. CONTENT: all samples, once, for hashes and statistics."""

    HEADERS = "headers"
    CONTENT = "content"


class IndexPaths(str, Enum):
    """How the manifest names the files: by absolute paths, or by relative ones.

    With relative paths the files and the manifest can be moved together.
    """

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class OldIndex(str, Enum):
    """What to do with an index that already exists: raise an error (REFUSE), or REPLACE it."""

    REFUSE = "refuse"
    REPLACE = "replace"


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """Result of `index_files`.

    Attributes:
        manifest: The manifest of the new dataset.
        too_short: Paths of files that are shorter than one token window and were left out.
        notes: What a user should know about the values: one sentence per field and reason.
    """

    manifest: Manifest
    too_short: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def index_files(
    out: Path | str,
    *,
    files: Sequence[str],
    fields: str | Sequence[FieldRequest],
    samples: SampleIs | None = None,
    tokens: TokenRequest | None = None,
    reading: IndexReading = IndexReading.HEADERS,
    paths: IndexPaths = IndexPaths.ABSOLUTE,
    old: OldIndex = OldIndex.REFUSE,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
    comm: Collective | None = None,
    decode: Decode | str | None = None,
    missing: str | float = "auto",
) -> Indexed:
    """Makes a dataset of existing HDF5 files without copying them, by writing a manifest.

    The manifest lists where the samples are. The files are not changed. Readers of the dataset accept a file as
    long as its size and modification time are the same. Collective over `comm`, whose ranks share the work.

    Args:
        out: Directory for the manifest.
        files: Names, globs (also `**`) and directories of the files.
        fields: The fields, such as `x=/images,y=/labels`: name and HDF5 path, perhaps with options.
            `NAME=/PATH:MEMBER` selects a member of a compound, `NAME:cf=/PATH` and `NAME:raw=/PATH` choose the
            decoding, and a `*` in a path matches the groups of a file.
        samples: What one sample is: a row of each dataset, a file, or a group of a file. None: groups if the paths
            have a `*`, else rows.
        tokens: Cut the rows of the field `tokens` into token windows.
        reading: Whether to read the content, for hashes and statistics, or only the headers.
        paths: Whether the manifest has absolute or relative paths.
        old: What to do if `out` already contains an index.
        block_bytes: Size of the hashed blocks, in bytes.
        progress: Called with the number of files of this rank done so far, and with their total number.
        comm: The ranks that share the work; None: this process alone.
        decode: How to decode fields that do not say it themselves. "cf": values are decoded while they are read, as
            the attributes of each file say. "raw": as stored. None: as stored, with a ValuesWarning if the numbers
            mean something else.
        missing: What missing values become if a field is decoded: "nan", a number, or "mask" (0, with True in a
            field `NAME.mask`). "auto": NaN; but integers of which only records that were never written can be
            missing, and of which none was seen, stay integers, and reading such a record is an error.

    Returns:
        The new dataset, and what a user should know about it.

    Raises:
        UsageError: On every rank, for an invalid request.
        DataError: On every rank, if a file cannot be indexed or does not fit the others; names the file.
    """
    comm = comm or SerialWorld()
    out = Path(out)
    if isinstance(fields, str):
        how = None if decode is None else parse_decode(decode)
        requests = parse_field_paths(fields, decode=how, missing=parse_missing(missing))
    else:
        requests = tuple(fields)
    kind_of_sample = sample_is(requests, asked=samples)
    if tokens is not None:
        check_token_request(requests, samples=kind_of_sample)
    names: list[str] = on_rank_0(comm, lambda: _files(out, files=files, old=old), os_error=DataError)

    comparison = SampleComparison()

    def inspect(path: str) -> dict[str, Any]:
        return asdict(inspect_file(path, requests=requests, comparison=comparison))

    looked = [FoundFile.of_json(found) for found in share_work(comm, names, inspect, progress=progress)]
    places = all_places(looked)
    choice = agreed(comm, lambda: choose_decoding(places, requests=requests), os_error=DataError)
    if tokens is not None and choice.decoding:
        raise UsageError("token streams are not decoded: leave --decode cf out", agreed=True)
    specs, streams = agreed(
        comm,
        lambda: _cut(places, requests=choice.requests, samples=kind_of_sample, tokens=tokens),
        os_error=DataError,
    )
    if comm.rank == 0:
        for note in choice.warnings:
            warnings.warn(note, ValuesWarning, stacklevel=2)
    used = [stream for stream in streams if stream.samples]
    builder = _Builder(
        out=out, specs=specs, decoding=choice.decoding, samples=kind_of_sample, paths=paths, block_bytes=block_bytes
    )  # fmt: skip
    contents: list[dict[str, Any]] = [{} for _ in used]
    if reading is IndexReading.CONTENT:
        contents = share_work(comm, used, builder.read, progress=progress)
    entries = [builder.entry(stream, content) for stream, content in zip(used, contents, strict=True)]
    windows = on_rank_0(comm, lambda: _write_windows(used, out=out), os_error=DataError)
    manifest = Manifest(
        version=3 if choice.decoding else 2,
        decoding=choice.decoding,
        kind=Kind.SAMPLES if tokens is None else Kind.TOKENS,
        samples=sum(entry.samples for entry in entries),
        block_bytes=block_bytes,
        fields=specs,
        tokens=None if tokens is None else tokens.windows,
        windows=None if windows is None else WindowList.model_validate(windows),
        indexed=True,
        statistics=builder.statistics(),
        attributes={"source": "index", TYPES_CHECKED: True},
        shards=tuple(entries),
    )
    on_rank_0(comm, lambda: write_manifest(manifest, directory=out), os_error=DataError)
    short = tuple(stream.place.file.path for stream in streams if not stream.samples)
    return Indexed(manifest=manifest, too_short=short, notes=_notes(places) + choice.notes)


def _notes(places: Sequence[FieldSource]) -> tuple[str, ...]:
    """Returns each note on a field once, with the first dataset to which it applies."""
    found: dict[tuple[str, str], str] = {}
    for place in places:
        for name, field in place.fields.items():
            if field.note:
                found.setdefault((name, field.note), f"field {name!r}, {place.describe(name)}, {field.note}")
    return tuple(found.values())


def _files(out: Path, *, files: Sequence[str], old: OldIndex) -> list[str]:
    """Returns the paths of the files. Raises UsageError if `out` may not be overwritten; does not change it."""
    if (out / MANIFEST_NAME).exists():
        if not read_manifest(out).indexed:
            raise UsageError(f"{out} holds a packed dataset: index into another directory")
        if old is OldIndex.REFUSE:
            raise UsageError(f"{out} already holds an index: --overwrite replaces it")
    return list(find_files(files))


def _cut(
    places: Sequence[FieldSource],
    *,
    requests: Sequence[FieldRequest],
    samples: SampleIs,
    tokens: TokenRequest | None,
) -> tuple[dict[str, FieldSpec], list[CutStream]]:
    """Returns the fields of a sample, and the samples of each source. Raises DataError."""
    specs = combine(places, requests=requests, samples=samples)
    if tokens is None:
        counts = [num_samples(place, samples=samples) for place in places]
        return specs, [
            CutStream(place=place, samples=count, num_tokens=0, starts=None)
            for place, count in zip(places, counts, strict=True)
        ]
    specs = {TOKENS_FIELD: token_field(places, spec=specs[TOKENS_FIELD], request=tokens)}
    streams = [cut_stream(place, request=tokens) for place in places]
    if not any(stream.samples for stream in streams):
        raise DataError(f"no file has a window of {tokens.window + 1} tokens: choose shorter windows")
    return specs, streams


def _write_windows(streams: Sequence[CutStream], *, out: Path) -> dict[str, Any] | None:
    out.mkdir(parents=True, exist_ok=True)
    starts: list[NDArray[np.int64]] = [stream.starts for stream in streams if stream.starts is not None]
    return write_windows(np.concatenate(starts), directory=out).model_dump() if starts else None


class _Builder:
    """Makes the manifest's entries, and accumulates the statistics of their content."""

    def __init__(
        self,
        *,
        out: Path,
        specs: dict[str, FieldSpec],
        decoding: dict[str, Decoding],
        samples: SampleIs,
        paths: IndexPaths,
        block_bytes: int,
    ) -> None:
        self._out = os.path.abspath(out)
        self._specs = specs
        self._decoding = decoding
        self._masks = {how.mask for how in decoding.values()}
        self._whole = samples is not SampleIs.ROWS
        self._paths = paths
        self._block_bytes = block_bytes
        self._moments: dict[str, Moments] = {}

    def read(self, stream: CutStream) -> dict[str, Any]:
        """Reads the numeric fields of one source, and returns their hashes and moments as JSON. Raises DataError."""
        numbers = {name: found for name, found in stream.place.fields.items() if found.kind != "strings"}
        limit = None
        if stream.num_tokens:
            limit = stream.num_tokens * np.dtype(numbers[TOKENS_FIELD].dtype).itemsize
        contents = read_content(
            stream.place.file.path,
            found=list(numbers.values()),
            block_bytes=self._block_bytes,
            hashed_bytes=limit,
            meant=[self._meant(stream.place, name) for name in numbers],
        )
        return {name: content.as_json() for name, content in zip(numbers, contents, strict=True)}

    def _meant(self, place: FieldSource, name: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """Returns a function from stored values to those of which the statistics are computed, with NaN for missing
        ones.

        Masks have no statistics, nor have values that a mask marks as missing.
        """
        how = self._decoding.get(name)
        if name in self._masks or (how is not None and how.mask is not None):
            return lambda stored: stored[:0]
        if how is None:
            return lambda stored: stored
        packing = packing_of(place, name)
        to_nan = Decoding(dtype="float64", missing="refused" if how.missing == "refused" else "nan")
        is_exact = (
            np.dtype(how.dtype).kind == "f"
        )  # integers are decoded as integers: only statistics are rounded

        def decoded(stored: NDArray[Any]) -> NDArray[Any]:
            try:
                return decode_values(stored, packing=packing, decoding=to_nan, is_exact=is_exact)[0]
            except DataError as error:
                raise DataError(
                    f"field {name!r}, {place.fields[name].dataset} of {place.file.path}: {error}"
                ) from error

        return decoded

    def entry(self, stream: CutStream, content: dict[str, Any]) -> ShardEntry:
        """Returns the manifest's entry of one source. `content` is what `read` returned, or {} without hashes."""
        file, fields = stream.place.file, stream.place.fields
        hashes: dict[str, tuple[str, ...]] = {}
        for name, document in content.items():
            one = HashedContent.of_json(document)
            self._moments[name] = self._moments.get(name, Moments()) + one.moments
            if self._specs[name].kind == "array":
                hashes[name] = one.hashes
        stored = {}
        for name, found in fields.items():
            num_bytes = found.num_bytes
            if stream.num_tokens:
                num_bytes = stream.num_tokens * np.dtype(found.dtype).itemsize
            stored[name] = StoredField(
                dataset=found.dataset,
                offset=found.offset,
                num_bytes=num_bytes,
                hashes=hashes.get(name, ()),
                whole=self._whole,
                member=found.member,
                big_endian=found.big_endian,
                packing=packing_of(stream.place, name) if name in self._decoding else None,
            )
        path = file.path if self._paths is IndexPaths.ABSOLUTE else os.path.relpath(file.path, self._out)
        return ShardEntry(
            file=path,
            samples=stream.samples,
            file_bytes=file.file_bytes,
            modified_ns=file.modified_ns,
            fields=stored,
        )

    def statistics(self) -> dict[str, FieldStatistics]:
        """Returns the statistics of the fields whose content was read."""
        found = {name: moments.statistics() for name, moments in self._moments.items()}
        return {name: statistics for name, statistics in found.items() if statistics is not None}
