"""Makes a dataset of existing HDF5 files without copying them: writes a manifest that lists where the samples are."""

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
"""Function that is called with two numbers of items: those that this rank has done, and those of its whole part."""


def share_work(
    comm: Collective,
    items: Sequence[Item],
    function: Callable[[Item], dict[str, Any]],
    *,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Divides `items` among the ranks, calls `function(item)` for each, and returns all results. Collective.

    All ranks get the results of all items, in the order of the items. The items must be the same on all ranks.
    Collective over `comm`. `function` must return JSON values. `progress` is called with the number of items that this
    rank has done so far, and with the number of its items. If `function` raises an error on one rank, all ranks raise
    this error.
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
    """Request to index files of tokens as samples that are windows of consecutive tokens.

    Raises UsageError if `window` or `stride` is below 1.

    Attributes:
        window: Number of tokens that are predicted in a sample. A sample has window + 1 tokens.
        stride: Number of tokens from the start of a window to the start of the next window.
        documents: Path of an HDF5 dataset in each file that contains the indices of the tokens at which documents
            begin. No window then crosses the start of a document. None: windows may cross the start of a document.
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
    """Raises UsageError unless the requested fields can be cut into token windows.

    Exactly one field must be requested, its name must be `tokens`, and each of its rows must be one token.
    """
    if [request.name for request in requests] != [TOKENS_FIELD]:
        raise UsageError(
            f"--tokens needs exactly one field, named {TOKENS_FIELD}: --fields {TOKENS_FIELD}=/PATH"
        )
    if samples is not SampleIs.ROWS or requests[0].has_wildcard:
        raise UsageError(
            "--tokens cuts the stream of each file into samples: leave out '*' in the path, and --samples"
        )


@dataclass(frozen=True, kw_only=True)
class CutStream:
    """The samples that were found in one file, or in one group of a file (`place`).

    `num_tokens` is the number of tokens in the part of the stream that windows use; it is 0 if the samples are not
    token windows. `starts` contains the index of the first token of each window, int64, shape (samples,), if no window
    may cross the start of a document; else it is None.
    """

    place: FieldSource
    samples: int
    num_tokens: int
    starts: NDArray[np.int64] | None


def token_field(places: Sequence[FieldSource], *, spec: FieldSpec, request: TokenRequest) -> FieldSpec:
    """Returns dtype and shape of the field `tokens` of samples that are token windows.

    `spec` describes the same field if each row of the files were a sample. Raises DataError unless each row is one
    integer.
    """
    if spec.shape or spec.kind != "array" or np.dtype(spec.dtype).kind not in "iu":
        raise DataError(
            f"{places[0].describe(TOKENS_FIELD)} is {spec.dtype} with rows of shape {spec.shape}, not a stream of "
            "integers: without --tokens its rows are the samples"
        )
    return FieldSpec(dtype=spec.dtype, shape=(request.window + 1,))


def cut_stream(place: FieldSource, *, request: TokenRequest) -> CutStream:
    """Cuts the tokens of the file `place` into windows. There are none if the file is shorter than one window.

    Raises DataError if the starts of documents in the file are not valid.
    """
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
    """What indexing reads from the files.

    HEADERS: Headers, but not the samples.
    CONTENT: Also all samples, once, to compute hashes and statistics.
    """

    HEADERS = "headers"
    CONTENT = "content"


class IndexPaths(str, Enum):
    """Which paths of the files are stored in the manifest.

    ABSOLUTE: Absolute paths.
    RELATIVE: Paths relative to the directory of the manifest. Files and manifest can then be moved together.
    """

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class OldIndex(str, Enum):
    """What to do if the directory already contains an index.

    REFUSE: Raise an error.
    REPLACE: Replace the index.
    """

    REFUSE = "refuse"
    REPLACE = "replace"


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """Result of `index_files`.

    Attributes:
        manifest: The manifest of the new dataset.
        too_short: Paths of files that were left out, because they have fewer tokens than one window.
        notes: Texts that the user should read about the values, one per field and reason.
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

    The manifest lists where the samples are. The files are not changed. The dataset can be read as long as the files
    have the same size and modification time. Collective over `comm` if it is given: the ranks share the work.

    Args:
        out: Directory for the manifest.
        files: The files to index: file names, globs (also with `**`), and directories.
        fields: The fields: for each a name and an HDF5 path, such as `x=/images,y=/labels`. `NAME=/PATH:MEMBER`
            selects a member of a compound. `NAME:cf=/PATH` and `NAME:raw=/PATH` choose the decoding. A `*` in a path
            matches the names of groups in a file.
        samples: What one sample is: a row of each HDF5 dataset, a file, or a group in a file. None: a group if the
            paths have a `*`, else a row.
        tokens: How to cut the rows of the field `tokens` into token windows; None: samples are not token windows.
        reading: Whether to read only the headers, or also all samples, for hashes and statistics.
        paths: Whether the manifest contains absolute or relative paths.
        old: What to do if `out` already contains an index.
        block_bytes: Size of the hashed blocks, in bytes.
        progress: Called with the number of files that this rank has done so far, and with the number of files that this
            rank is to do; None: not called.
        comm: The ranks that share the work; None: only this process.
        decode: How to read fields for which `fields` does not state it. "cf": values are decoded when they are read,
            as the attributes of each file state. "raw": values are read as they are stored. None: the same as "raw",
            but with a ValuesWarning if the attributes state that the stored numbers are not the values.
        missing: How missing values of a decoded field are represented. "nan": as NaN. A number: as that number.
            "mask": as 0, and as True in an additional field `NAME.mask`. "auto": as NaN, except for integer fields in
            which values can be missing only in records that were never written, and no such record was found. These
            fields stay integers, and reading such a record is an error.

    Returns:
        The manifest of the new dataset, and texts for the user about the dataset.

    Raises:
        UsageError: On every rank, for an invalid request.
        DataError: On every rank, if a file cannot be indexed, or does not agree with the other files. The message
            names the file.
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
    """Returns the notes on the indexed fields, texts for the user, each of them once.

    A note also names the first HDF5 dataset to which it applies.
    """
    found: dict[tuple[str, str], str] = {}
    for place in places:
        for name, field in place.fields.items():
            if field.note:
                found.setdefault((name, field.note), f"field {name!r}, {place.describe(name)}, {field.note}")
    return tuple(found.values())


def _files(out: Path, *, files: Sequence[str], old: OldIndex) -> list[str]:
    """Returns the paths of the files to index. Raises UsageError if the dataset in `out` must not be overwritten.

    Does not change `out`.
    """
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
    """Returns the fields of a sample, and the samples that are in each of `places`: a file, or a group in a file.

    `samples` states what one sample is, and `tokens` how token windows are cut (None: samples are not token windows).
    Raises DataError if the files do not agree.
    """
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
    """Makes the entries of an index's manifest, and accumulates statistics of the content of the indexed files."""

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
        """Reads the numeric fields of one file, or of one group in a file, and returns JSON values by field name.

        For each field these are the hashes of its blocks, and mean, variance and extremes of its values. `stream`
        describes the samples in the file. Raises DataError if reading fails.
        """
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
        """Returns a function that converts stored values of the field `name` to those for the statistics.

        Missing values become NaN, which statistics ignore. The function returns an empty array for masks, and for
        fields that have a mask: such fields have no statistics.
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
        """Returns the manifest entry of one file, or of one group in a file, and adds its values to the statistics.

        `stream` describes the samples in the file. `content` is the result of `read`, or {} if the content was not
        read.
        """
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
