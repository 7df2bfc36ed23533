"""Packs arrays and token streams into a dataset directory: shards first, the manifest last."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from hpctrain.data.manifest import (
    DTYPES,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    TOKENS_FIELD,
    FieldSpec,
    Kind,
    Manifest,
    ShardEntry,
    TokenWindows,
    write_manifest,
)
from hpctrain.data.shards import is_shard_name, write_shard
from hpctrain.errors import DataError, UsageError

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_OWN_NAMES = (MANIFEST_NAME, f".{MANIFEST_NAME}{PARTIAL_SUFFIX}")

Progress = Callable[[int, int | None], None]
"""Called with (done, total) after each shard: samples, or tokens; total is None when it is not known."""


class Existing(str, Enum):
    """What to do with a dataset that is already there."""

    REFUSE = "refuse"
    REPLACE = "replace"


def prepare_directory(directory: Path, *, existing: Existing = Existing.REFUSE) -> None:
    """Make `directory`, or empty it of a dataset that may be replaced. Only a dataset's files are removed.

    Raises UsageError if it is not empty, or holds anything else; DataError if the file system refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = sorted(child.name for child in directory.iterdir())
        if not names:
            return
        foreign = [name for name in names if name not in _OWN_NAMES and not is_shard_name(name)]
        if foreign:
            raise UsageError(
                f"{directory} holds files that belong to no dataset ({', '.join(foreign[:5])}): "
                "choose another directory, they are not removed"
            )
        if existing is Existing.REFUSE:
            what = "a dataset" if MANIFEST_NAME in names else "an unfinished dataset"
            raise UsageError(f"{directory} already holds {what}: choose another directory, or --overwrite")
        # The manifest goes first: what is left after an interruption is seen to be unfinished.
        for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
            (directory / name).unlink()
    except OSError as error:
        raise DataError(f"the directory {directory} cannot be used for a dataset: {error}") from error


def pack_arrays(
    directory: Path | str,
    fields: Mapping[str, NDArray[Any]],
    *,
    shard_bytes: int = SHARD_BYTES,
    shard_samples: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
) -> Manifest:
    """Pack arrays of equal first dimension: field name -> array of shape (num_samples, *sample_shape).

    A shard holds `shard_samples`, or as many samples as fit into `shard_bytes` (at least one). Arrays may be
    memory maps: one shard at a time is held in memory.
    Raises DataError for arrays that make no dataset, UsageError if the directory is not free.
    """
    directory = Path(directory)
    specs = {name: _spec_of(name, array) for name, array in fields.items()}
    lengths = {name: len(array) for name, array in fields.items()}
    if not lengths or len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items()) or "there is none"
        raise DataError(f"the fields of a dataset have the same number of samples: {counts}")
    num_samples = next(iter(lengths.values()))
    if num_samples == 0:
        raise DataError("the fields hold no samples: there is nothing to pack")
    if shard_samples is None:
        shard_samples = max(1, shard_bytes // sum(spec.sample_bytes for spec in specs.values()))
    _check_sizes(shard=shard_samples, block=block_bytes)
    prepare_directory(directory, existing=existing)
    shards = []
    for index, start in enumerate(range(0, num_samples, shard_samples)):
        stop = min(start + shard_samples, num_samples)
        arrays = {name: np.asarray(array[start:stop]) for name, array in fields.items()}
        shards.append(
            write_shard(directory, index=index, samples=stop - start, arrays=arrays, block_bytes=block_bytes)
        )
        if progress is not None:
            progress(stop, num_samples)
    return _finish(
        directory,
        kind=Kind.SAMPLES,
        fields=specs,
        shards=shards,
        block_bytes=block_bytes,
        tokens=None,
        attributes=attributes,
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
    attributes: Mapping[str, JsonValue] | None = None,
    existing: Existing = Existing.REFUSE,
    progress: Progress | None = None,
) -> Manifest:
    """Pack a stream of tokens; samples are windows of window + 1 tokens that begin `stride` tokens apart.

    chunks: arrays of shape (n,), concatenated to the stream; held in memory up to about `shard_bytes`.
    stride: `window` unless given, so that each token is predicted once. Tokens after the last whole window
    are dropped (fewer than `stride`). A shard repeats the tokens that its last window shares with the next
    shard, so that every window lies in one file.
    Raises DataError if the stream is shorter than one window.
    """
    directory = Path(directory)
    if dtype not in ("uint8", "uint16", "int32"):
        raise DataError(f"tokens of dtype {dtype} were asked; uint8, uint16 and int32 are possible")
    if window < 1 or (stride is not None and stride < 1):
        raise UsageError(f"window {window} and stride {stride} must be at least 1")
    windows = TokenWindows(window=window, stride=stride if stride is not None else window)
    itemsize = np.dtype(dtype).itemsize
    shard_samples = max(1, windows.windows_in(shard_bytes // itemsize))
    _check_sizes(shard=shard_bytes, block=block_bytes)
    prepare_directory(directory, existing=existing)
    shards: list[ShardEntry] = []
    stream = _Stream(chunks, dtype=dtype)
    while True:
        tokens = stream.peek(windows.tokens_for(shard_samples))
        samples = windows.windows_in(len(tokens))
        if samples == 0:
            break
        arrays = {TOKENS_FIELD: tokens[: windows.tokens_for(samples)]}
        shards.append(
            write_shard(directory, index=len(shards), samples=samples, arrays=arrays, block_bytes=block_bytes)
        )
        stream.skip(samples * windows.stride)
        if progress is not None:
            progress(stream.position, None)
        if samples < shard_samples:
            break
    if not shards:
        raise DataError(f"the stream has {stream.read_tokens} tokens, one window takes {window + 1}")
    return _finish(
        directory,
        kind=Kind.TOKENS,
        fields={TOKENS_FIELD: FieldSpec(dtype=dtype, shape=(window + 1,))},
        shards=shards,
        block_bytes=block_bytes,
        tokens=windows,
        attributes={**(attributes or {}), "stream_tokens": stream.read_tokens},
    )


class _Stream:
    """A cursor over concatenated chunks that keeps only what was peeked at and not skipped."""

    def __init__(self, chunks: Iterable[NDArray[Any]], *, dtype: str) -> None:
        self._chunks: Iterator[NDArray[Any]] = iter(chunks)
        self._dtype = np.dtype(dtype)
        self._held: NDArray[Any] = np.empty(0, dtype=self._dtype)
        self._to_skip = 0
        self.position = 0
        self.read_tokens = 0

    def peek(self, num_tokens: int) -> NDArray[Any]:
        """The next `num_tokens` tokens, fewer at the end of the stream."""
        parts, length = [self._held], len(self._held)
        while length < num_tokens:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            array = self._convert(chunk)
            self.read_tokens += len(array)
            dropped = min(self._to_skip, len(array))
            self._to_skip -= dropped
            parts.append(array[dropped:])
            length += len(array) - dropped
        self._held = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return self._held[:num_tokens]

    def skip(self, num_tokens: int) -> None:
        """Go on by `num_tokens`, also beyond what was peeked at."""
        self.position += num_tokens
        self._to_skip = max(0, num_tokens - len(self._held))
        self._held = self._held[num_tokens:]

    def _convert(self, chunk: NDArray[Any]) -> NDArray[Any]:
        array = np.asarray(chunk)
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer)):
            raise DataError(
                f"a chunk of tokens has shape {array.shape} and dtype {array.dtype}, not (n,) integers"
            )
        limits = np.iinfo(self._dtype)
        if len(array) and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise DataError(
                f"tokens from {array.min()} to {array.max()} do not fit into {self._dtype.name}: "
                "choose a wider dtype"
            )
        return array.astype(self._dtype, copy=False)


def _spec_of(name: str, array: NDArray[Any]) -> FieldSpec:
    if not _FIELD_NAME.fullmatch(name):
        raise DataError(
            f"field name {name!r}: letters, digits, '_', '.' and '-' are possible, not first '.' or '-'"
        )
    if array.ndim == 0:
        raise DataError(f"field {name!r} is a scalar: an array with one entry a sample is needed")
    if array.dtype.name not in DTYPES:
        raise DataError(f"field {name!r} has dtype {array.dtype}; possible are {', '.join(DTYPES)}")
    try:
        return FieldSpec(dtype=array.dtype.name, shape=array.shape[1:])
    except ValidationError:
        raise DataError(f"field {name!r} has samples of shape {array.shape[1:]}: they hold nothing") from None


def _check_sizes(*, shard: int, block: int) -> None:
    if shard < 1 or block < 1:
        raise UsageError(f"a shard of {shard} and blocks of {block} bytes were asked; both are at least 1")


def _finish(
    directory: Path,
    *,
    kind: Kind,
    fields: Mapping[str, FieldSpec],
    shards: list[ShardEntry],
    block_bytes: int,
    tokens: TokenWindows | None,
    attributes: Mapping[str, JsonValue] | None,
) -> Manifest:
    """Write the manifest: from here on the dataset exists."""
    manifest = Manifest(
        kind=kind,
        samples=sum(shard.samples for shard in shards),
        block_bytes=block_bytes,
        fields=dict(fields),
        tokens=tokens,
        attributes=dict(attributes or {}),
        shards=tuple(shards),
    )
    try:
        write_manifest(manifest, directory=directory)
    except OSError as error:
        raise DataError(f"the manifest in {directory} cannot be written: {error}") from error
    return manifest
