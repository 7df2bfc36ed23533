"""Assigns the shards of a dataset to ranks, makes their content, and writes them in step with the other ranks.

If the samples are known in advance, shard i is made by rank i % num_ranks, and the dataset is the same for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective, agreed, all_gather_json
from hpctrain.data.format.manifest import TOKENS_FIELD, FieldSpec, TokenWindows
from hpctrain.data.format.shard_file import is_as_written, shard_name, write_shard
from hpctrain.data.format.token_windows import split_windows
from hpctrain.data.hdf5.encode import ShardCompression
from hpctrain.data.packing.resume_record import Plan, ShardRecord, make_record, read_record, write_record
from hpctrain.data.packing.token_documents import Documents, read_stream
from hpctrain.data.sources.row_source import Rows
from hpctrain.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with (done, total) samples of all ranks after each shard; total is None if it is unknown."""

DOCUMENTS_DATASET = "documents"


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """Content of one shard. other_datasets: additional HDF5 datasets that are not fields."""

    samples: int
    fields: Mapping[str, FieldSpec]
    arrays: Mapping[str, NDArray[Any]]
    other_datasets: Mapping[str, NDArray[Any]]


class ShardMaker(Protocol):
    """Makes the shards of one rank in order. Call `begin`, then `make` or `skip`, until `begin` returns None."""

    def begin(self) -> str | None:
        """Returns the file name of the next shard; None after the last."""

    def make(self) -> ShardContent:
        """Returns the content of the current shard. Raises DataError."""

    def skip(self, samples: int) -> None:
        """Skips the current shard, which exists already and has `samples` samples."""


class RowShards:
    """Makes shards of `shard_samples` samples each from `rows`."""

    def __init__(self, rows: Rows, *, shard_samples: int, rank: int, num_ranks: int) -> None:
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
class WindowPlan:
    """Assignment of the windows of a token stream to shards; each shard is a range of tokens with whole windows.

    first, stop: token range of each shard, `stop` excluded; counts: windows of each shard. int64, shape (shards,).
    starts: first token of each window of the dataset, relative to its shard, int64, shape (samples,); None if the
    windows are `stride` tokens apart.
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
) -> WindowPlan:
    """Cuts a stream into shards of at most `shard_tokens` tokens, but at least one window.

    split: no window crosses the beginning of a document; documents shorter than window + 1 are left out.
    Raises DataError if no window fits.
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
    raise DataError(f"the {what} has {longest} tokens, one window takes {window + 1}")


def _cut_evenly(windows: TokenWindows, *, samples: int, shard_tokens: int) -> WindowPlan:
    """Returns the plan for windows at a fixed stride. Needs memory per shard, not per window."""
    shard_samples = max(1, windows.windows_in(shard_tokens))
    begins = np.arange(0, samples, shard_samples, dtype=np.int64)
    counts = np.minimum(shard_samples, samples - begins)
    first = begins * windows.stride
    stop = first + (counts - 1) * windows.stride + windows.window + 1
    return WindowPlan(first=first, stop=stop, counts=counts, starts=None)


def _cut_listed(windows: NDArray[np.int64], *, window: int, shard_tokens: int) -> WindowPlan:
    cuts = [0]
    while cuts[-1] < len(windows):
        begin = cuts[-1]
        last = int(np.searchsorted(windows, windows[begin] + shard_tokens - window - 1, side="right"))
        cuts.append(max(begin + 1, last))
    bounds = np.array(cuts, dtype=np.int64)
    first, last_window = windows[bounds[:-1]], windows[bounds[1:] - 1]
    counts = np.diff(bounds)
    starts = windows - np.repeat(first, counts)
    return WindowPlan(first=first, stop=last_window + window + 1, counts=counts, starts=starts)


class DocumentShards:
    """Makes shards of token windows, each with a dataset of the positions at which documents begin in it."""

    def __init__(
        self, documents: Documents, *, plan: WindowPlan, window: int, rank: int, num_ranks: int
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
    maker: ShardMaker, *, directory: Path, plan: Plan, block_bytes: int, compression: ShardCompression | None
) -> Iterator[ShardRecord]:
    """Writes the shards of one rank and yields their records. Keeps shards that were finished with the same plan."""
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


def write_together(
    records: Iterator[ShardRecord], *, comm: Collective, total: int | None, progress: Progress | None
) -> list[str]:
    """Runs every rank's iterator to its end, one shard at a time. Collective over `comm`.

    Returns the file names of all ranks' shards. An error of one rank is raised on all ranks after their current
    shard.
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
