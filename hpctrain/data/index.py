"""Makes a dataset of HDF5 files where they lie: a manifest that says where the samples are, and no copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.index_content import Content, read_content
from hpctrain.data.index_fields import Place, all_places, combine, num_samples
from hpctrain.data.index_inspect import inspect_file
from hpctrain.data.index_request import FieldRequest, SampleIs, find_files, parse_fields, sample_is
from hpctrain.data.index_tokens import CutStream, TokenRequest, check_token_request, cut_stream, token_field
from hpctrain.data.manifest import (
    MANIFEST_NAME,
    TOKENS_FIELD,
    FieldSpec,
    FieldStatistics,
    Kind,
    Manifest,
    ShardEntry,
    StoredField,
    WindowList,
    read_manifest,
    write_manifest,
)
from hpctrain.data.statistics import Moments
from hpctrain.data.token_windows import write_windows
from hpctrain.errors import DataError, UsageError

BLOCK_BYTES = 1 << 20

Progress = Callable[[int, int | None], None]
"""Called with (done, total) files."""


class Reading(str, Enum):
    """`headers`: the samples are not read. `content`: all are, once, for hashes and statistics."""

    HEADERS = "headers"
    CONTENT = "content"


class Paths(str, Enum):
    """How the manifest names the files; relative ones can be moved together with the manifest."""

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class OldIndex(str, Enum):
    """What happens to an index that is there already."""

    REFUSE = "refuse"
    REPLACE = "replace"


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """The new dataset, and the files that are too short for a window and were left out."""

    manifest: Manifest
    too_short: tuple[str, ...] = ()


def index_files(
    out: Path | str,
    *,
    files: Sequence[str],
    fields: str | Sequence[FieldRequest],
    samples: SampleIs | None = None,
    tokens: TokenRequest | None = None,
    reading: Reading = Reading.HEADERS,
    paths: Paths = Paths.ABSOLUTE,
    old: OldIndex = OldIndex.REFUSE,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> Indexed:
    """Write the manifest of `files` (names, globs, directories) into the directory `out`.

    fields: as in `x=/images,y=/labels` (see `parse_fields`). samples: None chooses (see `sample_is`).
    The files are neither copied nor changed; whoever reads the dataset later trusts them as long as size and
    time of change are the same. Not collective.
    Raises UsageError; DataError, which names the file that cannot be indexed, or does not fit the others.
    """
    out = Path(out)
    requests = parse_fields(fields) if isinstance(fields, str) else tuple(fields)
    kind_of_sample = sample_is(requests, asked=samples)
    if tokens is not None:
        check_token_request(requests, samples=kind_of_sample)
    _check_room(out, old=old)
    found = find_files(files)
    looked = []
    for number, path in enumerate(found):
        looked.append(inspect_file(path, requests=requests))
        if progress is not None:
            progress(number + 1, len(found))
    places = all_places(looked)
    specs = combine(places, requests=requests, samples=kind_of_sample)
    streams = [_stream(place, samples=kind_of_sample, tokens=tokens) for place in places]
    if tokens is not None:
        specs = {TOKENS_FIELD: token_field(places, spec=specs[TOKENS_FIELD], request=tokens)}
    used = [stream for stream in streams if stream.samples]
    if not used:
        raise DataError(
            f"no file has a window of {specs[TOKENS_FIELD].shape[0]} tokens: choose shorter windows"
        )
    builder = _Builder(out=out, specs=specs, samples=kind_of_sample, paths=paths, block_bytes=block_bytes)
    entries = []
    for number, stream in enumerate(used):
        entries.append(builder.entry(stream, reading=reading))
        if progress is not None and reading is Reading.CONTENT:
            progress(number + 1, len(used))
    try:
        out.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            kind=Kind.SAMPLES if tokens is None else Kind.TOKENS,
            samples=sum(entry.samples for entry in entries),
            block_bytes=block_bytes,
            fields=specs,
            tokens=None if tokens is None else tokens.windows,
            windows=_write_windows(used, out=out),
            indexed=True,
            statistics=builder.statistics(),
            attributes={"source": "index"},
            shards=tuple(entries),
        )
        write_manifest(manifest, directory=out)
    except OSError as error:
        raise DataError(f"the index in {out} cannot be written: {error}") from error
    short = tuple(stream.place.file.path for stream in streams if not stream.samples)
    return Indexed(manifest=manifest, too_short=short)


def _check_room(out: Path, *, old: OldIndex) -> None:
    """Whether an index may be written there; an older one stays until the new one is complete."""
    if not (out / MANIFEST_NAME).exists():
        return
    if not read_manifest(out).indexed:
        raise UsageError(f"{out} holds a packed dataset: index into another directory")
    if old is OldIndex.REFUSE:
        raise UsageError(f"{out} holds an index already: --overwrite replaces it")


def _stream(place: Place, *, samples: SampleIs, tokens: TokenRequest | None) -> CutStream:
    if tokens is not None:
        return cut_stream(place, request=tokens)
    count = num_samples(place, samples=samples)
    return CutStream(place=place, samples=count, num_tokens=0, starts=None)


def _write_windows(streams: Sequence[CutStream], *, out: Path) -> WindowList | None:
    starts: list[NDArray[np.int64]] = [stream.starts for stream in streams if stream.starts is not None]
    return write_windows(np.concatenate(starts), directory=out) if starts else None


class _Builder:
    """Turns places into entries of the manifest, and adds up what their content has."""

    def __init__(
        self,
        *,
        out: Path,
        specs: dict[str, FieldSpec],
        samples: SampleIs,
        paths: Paths,
        block_bytes: int,
    ) -> None:
        self._out = os.path.abspath(out)
        self._specs = specs
        self._whole = samples is not SampleIs.ROWS
        self._paths = paths
        self._block_bytes = block_bytes
        self._moments: dict[str, Moments] = {}

    def entry(self, stream: CutStream, *, reading: Reading) -> ShardEntry:
        """The entry of one place; with its content read, if so asked. Raises DataError."""
        file, fields = stream.place.file, stream.place.fields
        content: dict[str, Content] = {}
        if reading is Reading.CONTENT:
            content = self._read(stream)
        stored = {}
        for name, found in fields.items():
            num_bytes = found.num_bytes
            if stream.num_tokens:
                num_bytes = stream.num_tokens * np.dtype(found.dtype).itemsize
            stored[name] = StoredField(
                dataset=found.dataset,
                offset=found.offset,
                num_bytes=num_bytes,
                hashes=content[name].hashes if name in content else (),
                whole=self._whole,
                member=found.member,
                big_endian=found.big_endian,
            )
        path = file.path if self._paths is Paths.ABSOLUTE else os.path.relpath(file.path, self._out)
        return ShardEntry(
            file=path,
            samples=stream.samples,
            file_bytes=file.file_bytes,
            modified_ns=file.modified_ns,
            fields=stored,
        )

    def _read(self, stream: CutStream) -> dict[str, Content]:
        file = stream.place.file
        numbers = {name: found for name, found in stream.place.fields.items() if found.kind != "strings"}
        limit = None
        if stream.num_tokens:
            limit = stream.num_tokens * np.dtype(numbers[TOKENS_FIELD].dtype).itemsize
        found = list(numbers.values())
        read = read_content(file.path, found=found, block_bytes=self._block_bytes, hashed_bytes=limit)
        for name, content in zip(numbers, read, strict=True):
            self._moments[name] = self._moments.get(name, Moments()) + content.moments
        return {
            name: content
            for name, content in zip(numbers, read, strict=True)
            if self._specs[name].kind == "array"
        }

    def statistics(self) -> dict[str, FieldStatistics]:
        """Of the fields whose content was read."""
        found = {name: moments.statistics() for name, moments in self._moments.items()}
        return {name: statistics for name, statistics in found.items() if statistics is not None}
