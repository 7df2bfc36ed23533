"""Assigns the shards of a dataset to ranks, makes the content of the shards, and writes them.

If the number of samples is known in advance, shard i is made by rank i % num_ranks, and the dataset is the same for
any number of ranks. After each shard, the ranks exchange whether there was an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.comm import Collective, agreed, all_gather_json
from hpctrain.data.format.manifest import TOKENS_FIELD, FieldSpec, TokenWindows
from hpctrain.data.format.shard_file import is_as_written, shard_name, write_shard
from hpctrain.data.format.token_windows import split_windows
from hpctrain.data.hdf5.filters import ShardCompression
from hpctrain.data.packing.directory import PackingSpec, ShardRecord, make_record, read_record, write_record
from hpctrain.data.sources.row_source import SampleRows, field_spec
from hpctrain.errors import DataError, HpctrainError

# Token stream of concatenated documents whose lengths are known before they are read.


TOKEN_DTYPES = ("uint8", "uint16", "int32")


class Documents(Protocol):
    """Interface of a sequence of tokenized documents, which together form one stream of tokens.

    `starts` contains the index of the first token of each document in the concatenated stream, followed by the number
    of tokens of the stream: int64, shape (number of documents + 1,).
    """

    @property
    def dtype(self) -> str: ...

    @property
    def starts(self) -> NDArray[np.int64]: ...

    @property
    def identity(self) -> JsonValue:
        """Value that changes if the content of the documents changes. Computed without reading the documents."""

    def read(self, number: int, *, start: int, stop: int) -> NDArray[Any]:
        """Returns tokens start to stop - 1 of the document of index `number`, shape (stop - start,).

        Raises DataError if the tokens cannot be read.
        """


def read_stream(documents: Documents, *, start: int, stop: int) -> NDArray[Any]:
    """Returns tokens start to stop - 1 of the stream that consists of all documents, one after another.

    Raises DataError if the tokens cannot be read.
    """
    starts = documents.starts
    stream = np.empty(stop - start, dtype=documents.dtype)
    number = int(np.searchsorted(starts, start, side="right")) - 1
    position = start
    while position < stop:
        begin, end = int(starts[number]), int(starts[number + 1])
        until = min(stop, end)
        if until > position:
            stream[position - start : until - start] = documents.read(
                number, start=position - begin, stop=until - begin
            )
            position = until
        number += 1
    return stream


def check_token_dtype(dtype: str) -> None:
    """Raises DataError if tokens cannot be stored with dtype `dtype`, the name of a numpy dtype."""
    if dtype not in TOKEN_DTYPES:
        raise DataError(f"tokens cannot have dtype {dtype}: choose uint8, uint16 or int32")


def as_tokens(chunk: NDArray[Any], *, dtype: str) -> NDArray[Any]:
    """Returns the tokens in `chunk` as an array of dtype `dtype`.

    Raises DataError if `chunk` is not an array of integers of shape (n,), or if the integers do not fit `dtype`.
    """
    array = np.asarray(chunk)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"a chunk of tokens has shape {array.shape} and dtype {array.dtype}, not (n,) integers"
        )
    limits = np.iinfo(dtype)
    if len(array) and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise DataError(
            f"tokens from {array.min()} to {array.max()} do not fit into {dtype}: choose a wider dtype"
        )
    return array.astype(dtype, copy=False)


# Assigns the shards of a dataset to ranks, makes their content, and writes them in step with the other
# ranks.


Progress = Callable[[int, int | None], None]
"""Function that is called after each shard with two numbers of samples, over all ranks: those done, and their total.

The total is None if it is unknown.
"""

DOCUMENTS_DATASET = "documents"


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """Content of one shard, before it is written: the fields of a sample, and the arrays of all samples.

    `other_datasets` are additional HDF5 datasets, by name, that are not fields.
    """

    samples: int
    fields: Mapping[str, FieldSpec]
    arrays: Mapping[str, NDArray[Any]]
    other_datasets: Mapping[str, NDArray[Any]]


class ShardMaker(Protocol):
    """Interface of an object that makes the shards of one rank, in order.

    Call `begin` for each shard, and then either `make` or `skip`, until `begin` returns None.
    """

    def begin(self) -> str | None:
        """Begins the next shard and returns its file name. Returns None after the last shard."""

    def make(self) -> ShardContent:
        """Returns the content of the current shard. Raises DataError if the source cannot be read."""

    def skip(self, samples: int) -> None:
        """Skips the current shard, which exists already and has `samples` samples."""


class RowShards:
    """Makes shards of `shard_samples` samples each from a source that is read by position."""

    def __init__(self, rows: SampleRows, *, shard_samples: int, rank: int, num_ranks: int) -> None:
        self._rows = rows
        self._shard_samples = shard_samples
        self._num_ranks = num_ranks
        self._next = rank

    def begin(self) -> str | None:
        return shard_name(self._next) if self._start < self._rows.num_samples else None

    def make(self) -> ShardContent:
        start = self._start
        positions = np.arange(start, min(start + self._shard_samples, self._rows.num_samples))
        self.skip(len(positions))
        arrays = self._rows.read(positions)
        return ShardContent(
            samples=len(positions), fields=self._rows.fields, arrays=arrays, other_datasets={}
        )

    def skip(self, samples: int) -> None:
        self._next += self._num_ranks

    @property
    def _start(self) -> int:
        return self._next * self._shard_samples


@dataclass(frozen=True, kw_only=True)
class WindowAssignment:
    """Assigns the windows (samples) of a token stream to shards. A shard is a range of tokens with whole windows.

    Attributes:
        first: For each shard, the index in the stream of its first token: int64, shape (num_shards,).
        stop: For each shard, the index in the stream after its last token: int64, shape (num_shards,).
        counts: Number of windows of each shard: int64, shape (num_shards,).
        starts: Index of the first token of each window within the window's shard: int64, shape (num_samples,). None if
            the windows of a shard are `stride` tokens apart.
    """

    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64] | None

    @property
    def num_samples(self) -> int:
        return int(self.counts.sum())


def plan_windows(
    documents: Documents, *, window: int, stride: int, shard_tokens: int, split: bool
) -> WindowAssignment:
    """Assigns the windows of a token stream to shards of at most `shard_tokens` tokens.

    A shard contains at least one window, even if the window has more tokens. With `split` no window crosses the start
    of a document, and documents shorter than window + 1 tokens are left out. Raises DataError if no window fits into
    the stream, or with `split` into any document.
    """
    borders = documents.starts
    num_tokens = int(borders[-1])
    if split:
        windows = split_windows(borders[:-1], num_tokens=num_tokens, window=window, stride=stride)
        if len(windows):
            return _cut_listed(windows, window=window, shard_tokens=shard_tokens)
        longest, what = int(np.diff(borders).max(initial=0)), "longest document"
    else:
        even = TokenWindows(window=window, stride=stride)
        if (samples := even.windows_in(num_tokens)) > 0:
            return _cut_evenly(even, samples=samples, shard_tokens=shard_tokens)
        longest, what = num_tokens, "stream"
    raise DataError(f"the {what} has {longest} tokens, one window takes {window + 1}: choose shorter windows")


def _cut_evenly(windows: TokenWindows, *, samples: int, shard_tokens: int) -> WindowAssignment:
    """Assigns windows that are `stride` tokens apart to shards of at most `shard_tokens` tokens.

    `windows` states the length and the stride of the windows, and `samples` is their number. The result takes memory
    per shard, not per window.
    """
    shard_samples = max(1, windows.windows_in(shard_tokens))
    begins = np.arange(0, samples, shard_samples, dtype=np.int64)
    counts = np.minimum(shard_samples, samples - begins)
    first = begins * windows.stride
    stop = first + (counts - 1) * windows.stride + windows.window + 1
    return WindowAssignment(first=first, stop=stop, counts=counts, starts=None)


def _cut_listed(windows: NDArray[np.int64], *, window: int, shard_tokens: int) -> WindowAssignment:
    cuts = [0]
    while cuts[-1] < len(windows):
        begin = cuts[-1]
        last = int(np.searchsorted(windows, windows[begin] + shard_tokens - window - 1, side="right"))
        cuts.append(max(begin + 1, last))
    bounds = np.array(cuts, dtype=np.int64)
    first, last_window = windows[bounds[:-1]], windows[bounds[1:] - 1]
    counts = np.diff(bounds)
    starts = windows - np.repeat(first, counts)
    return WindowAssignment(first=first, stop=last_window + window + 1, counts=counts, starts=starts)


class DocumentShards:
    """Makes shards from tokenized documents. A sample is a window of tokens.

    In each shard, the additional HDF5 dataset `documents` contains the index of the first token of each document that
    begins in the shard.
    """

    def __init__(
        self, documents: Documents, *, plan: WindowAssignment, window: int, rank: int, num_ranks: int
    ) -> None:
        self._documents = documents
        self._plan = plan
        self._fields = {TOKENS_FIELD: FieldSpec(dtype=documents.dtype, shape=(window + 1,))}
        self._num_ranks = num_ranks
        self._next = rank

    def begin(self) -> str | None:
        return shard_name(self._next) if self._next < len(self._plan.first) else None

    def make(self) -> ShardContent:
        first, stop = int(self._plan.first[self._next]), int(self._plan.stop[self._next])
        samples = int(self._plan.counts[self._next])
        self.skip(samples)
        begins = self._documents.starts[:-1]
        inside = begins[np.searchsorted(begins, first) : np.searchsorted(begins, stop)] - first
        return ShardContent(
            samples=samples,
            fields=self._fields,
            arrays={TOKENS_FIELD: read_stream(self._documents, start=first, stop=stop)},
            other_datasets={DOCUMENTS_DATASET: inside.astype(np.int64)},
        )

    def skip(self, samples: int) -> None:
        self._next += self._num_ranks


def make_shards(
    maker: ShardMaker,
    *,
    directory: Path,
    plan: PackingSpec,
    block_bytes: int,
    compression: ShardCompression | None,
) -> Iterator[ShardRecord]:
    """Writes the shards of one rank, and yields a `ShardRecord` for each finished shard.

    A shard that an earlier, interrupted packing with the same `plan` has written is kept, if its content matches the
    record that was written with it.
    """
    while (file := maker.begin()) is not None:
        record = read_record(directory, file, plan=plan)
        if record is not None and is_as_written(directory, entry=record.entry, block_bytes=block_bytes):
            maker.skip(record.entry.samples)
        else:
            content = maker.make()
            entry = write_shard(
                directory,
                file=file,
                samples=content.samples,
                arrays=content.arrays,
                other_datasets=content.other_datasets,
                block_bytes=block_bytes,
                compression=compression,
            )
            named = {} if TOKENS_FIELD in content.arrays and content.other_datasets else content.arrays
            record = make_record(entry, fields=content.fields, arrays=named)
            write_record(directory, record, plan=plan)
        yield record


def write_shards_together(
    records: Iterator[ShardRecord], *, comm: Collective, total: int | None, progress: Progress | None
) -> list[str]:
    """Writes the shards of all ranks, by taking elements from each rank's iterator `records` until all have ended.

    Taking an element of `records` writes a shard. Collective over `comm`. Returns the file names of the shards of all
    ranks. If a rank has an error, all ranks raise this error after their current shard. After each round, rank 0 calls
    `progress` with the number of samples written so far, over all ranks, and with `total`.
    """
    mine: list[str] = []
    done = 0
    while True:
        record = agreed(comm, lambda: next(records, None), os_error=DataError)
        step = torch.tensor([record.entry.samples if record else 0, int(record is not None)])
        comm.all_reduce(step)
        if not int(step[1]):
            break
        if record is not None:
            mine.append(record.entry.file)
        done += int(step[0])
        if progress is not None and comm.rank == 0:
            progress(done, total)
    return [file for part in all_gather_json(comm, mine) for file in part]


# Makes shards from sources that can only be read sequentially: token chunks, and iterators over samples.


Sample = Mapping[str, Any]


class StreamShards:
    """Makes shards from a stream of tokens that comes in arrays (chunks). Holds about one shard in memory."""

    def __init__(
        self, chunks: Iterable[NDArray[Any]], *, windows: TokenWindows, dtype: str, shard_samples: int
    ) -> None:
        self._stream = _Stream(chunks, dtype=dtype)
        self._windows = windows
        self._shard_samples = shard_samples
        self._fields = {TOKENS_FIELD: FieldSpec(dtype=dtype, shape=(windows.window + 1,))}
        self._next = 0

    @property
    def read_tokens(self) -> int:
        """Number of tokens read so far."""
        return self._stream.read_tokens

    def begin(self) -> str | None:
        if len(self._stream.peek(self._windows.window + 1)) <= self._windows.window:
            self._stream.drain()
            return None
        return shard_name(self._next)

    def make(self) -> ShardContent:
        tokens = self._stream.peek(self._windows.tokens_for(self._shard_samples))
        samples = self._windows.windows_in(len(tokens))
        arrays = {TOKENS_FIELD: tokens[: self._windows.tokens_for(samples)]}
        self.skip(samples)
        return ShardContent(samples=samples, fields=self._fields, arrays=arrays, other_datasets={})

    def skip(self, samples: int) -> None:
        self._next += 1
        self._stream.skip(samples * self._windows.stride)


class _Stream:
    """A cursor that moves over a stream of tokens, which comes in arrays of tokens (chunks).

    Keeps only those tokens in memory that `peek` has read and `skip` has not yet passed.
    """

    def __init__(self, chunks: Iterable[NDArray[Any]], *, dtype: str) -> None:
        self._chunks: Iterator[NDArray[Any]] = iter(chunks)
        self._dtype = dtype
        self._held: NDArray[Any] = np.empty(0, dtype=self._dtype)
        self._to_skip = 0
        self.read_tokens = 0

    def peek(self, num_tokens: int) -> NDArray[Any]:
        """Returns the next `num_tokens` tokens without moving the cursor, or fewer at the end of the stream."""
        parts, length = [self._held], len(self._held)
        while length < num_tokens:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            array = as_tokens(chunk, dtype=self._dtype)
            self.read_tokens += len(array)
            dropped = min(self._to_skip, len(array))
            self._to_skip -= dropped
            parts.append(array[dropped:])
            length += len(array) - dropped
        self._held = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return self._held[:num_tokens]

    def skip(self, num_tokens: int) -> None:
        """Moves the cursor forward by `num_tokens` tokens, which may be more than `peek` has read so far."""
        self._to_skip += max(0, num_tokens - len(self._held))
        self._held = self._held[num_tokens:]

    def drain(self) -> None:
        """Reads the rest of the stream only to count its tokens."""
        for chunk in self._chunks:
            self.read_tokens += len(chunk)


class IteratorShards:
    """Makes shards from samples that iterators yield. The source is divided into parts with one iterator each.

    A sample is a dict of arrays and numbers. `open_part` takes the index of a part and returns an iterator over its
    samples. `parts` are the indices of this rank's parts. The first sample of a part determines the fields of the part.
    The arrays of one shard are held in memory.
    """

    def __init__(
        self,
        open_part: Callable[[int], Iterator[Sample]],
        *,
        parts: Sequence[int],
        num_parts: int,
        shard_bytes: int,
        shard_samples: int | None,
    ) -> None:
        self._open_part = open_part
        self._parts = list(parts)
        self._num_parts = num_parts
        self._shard_bytes = shard_bytes
        self._shard_samples = shard_samples
        self._samples: _Checked | None = None
        self._index = 0

    def begin(self) -> str | None:
        while self._parts:
            part = self._parts[0]
            if self._samples is None:
                self._samples, self._index = _Checked(self._open_part(part), part=part), 0
            if self._samples.peek() is not None:
                return shard_name(self._index, part=part if self._num_parts > 1 else None)
            self._parts.pop(0)
            self._samples = None
        return None

    def make(self) -> ShardContent:
        assert self._samples is not None
        fields = self._samples.fields
        sample_bytes = sum(spec.sample_bytes for spec in fields.values())
        at_most = self._shard_samples or max(1, self._shard_bytes // sample_bytes)
        taken = self._samples.take(at_most)
        self._index += 1
        arrays = {name: np.stack([sample[name] for sample in taken]) for name in fields}
        return ShardContent(samples=len(taken), fields=fields, arrays=arrays, other_datasets={})

    def skip(self, samples: int) -> None:
        assert self._samples is not None
        self._samples.drop(samples)
        self._index += 1


class _Checked:
    """Takes samples from a user's iterator and converts them to arrays.

    Raises DataError if a sample does not have the same fields, dtypes and shapes as the first sample.
    """

    def __init__(self, samples: Iterator[Sample], *, part: int) -> None:
        self._samples = samples
        self._part = part
        self._ahead: dict[str, NDArray[Any]] | None = None
        self._number = 0
        self.fields: dict[str, FieldSpec] = {}

    def peek(self) -> dict[str, NDArray[Any]] | None:
        """Returns the next sample without consuming it, or None if no samples remain."""
        if self._ahead is None:
            self._ahead = self._convert(self._pull())
        return self._ahead

    def take(self, number: int) -> list[dict[str, NDArray[Any]]]:
        """Returns the next `number` samples, or all remaining samples if they are fewer."""
        taken: list[dict[str, NDArray[Any]]] = []
        while len(taken) < number and (sample := self.peek()) is not None:
            taken.append(sample)
            self._ahead = None
        return taken

    def drop(self, number: int) -> None:
        """Skips `number` samples without checking them. Raises DataError if fewer samples remain."""
        if number and self._ahead is not None:
            self._ahead, number = None, number - 1
        for _ in range(number):
            if self._pull() is None:
                raise DataError(
                    f"{self._where} there are no more samples, but shards of the interrupted packing have more: "
                    "the iterator has changed, pack again with --overwrite"
                )

    @property
    def _where(self) -> str:
        return f"at sample {self._number} of part {self._part} of the iterator"

    def _pull(self) -> Any:
        try:
            sample = next(self._samples, None)
        except (HpctrainError, MemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataError(f"{self._where} it raised {type(error).__name__}: {error}") from error
        self._number += sample is not None
        return sample

    def _convert(self, sample: Any) -> dict[str, NDArray[Any]] | None:
        if sample is None:
            return None
        if not isinstance(sample, Mapping) or not sample:
            raise DataError(
                f"{self._where} it yields {type(sample).__name__}, not a dict of arrays by field name"
            )
        try:
            arrays = {str(name): np.asarray(value) for name, value in sample.items()}
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{self._where} a field is not an array: {error}") from error
        if not self.fields:
            self.fields = {
                name: field_spec(name, dtype=array.dtype, shape=array.shape) for name, array in arrays.items()
            }
        if arrays.keys() != self.fields.keys():
            raise DataError(
                f"{self._where} the fields are {', '.join(arrays)}; the first sample had {', '.join(self.fields)}"
            )
        for name, array in arrays.items():
            spec = self.fields[name]
            if array.dtype.name != spec.dtype or array.shape != spec.shape:
                raise DataError(
                    f"{self._where} field {name!r} is {array.dtype} {array.shape}, in the first sample "
                    f"{spec.dtype} {spec.shape}: all samples must be alike (pad or resize them)"
                )
        return arrays
