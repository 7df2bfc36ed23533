"""Which rank makes which shard of a dataset, of what; and writing them, in step with the other ranks.

Where the samples are known beforehand, shard i is made by rank i % num_ranks, and the dataset is the same for
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm.collectives.agreement import agreed, all_gather_json
from hpctrain.comm.interface.communicator import Collective
from hpctrain.data.format.manifest import TOKENS_FIELD, FieldSpec, TokenWindows
from hpctrain.data.format.shard_file import is_as_written, shard_name, write_shard
from hpctrain.data.format.token_windows import split_windows
from hpctrain.data.hdf5.encode import ShardCompression
from hpctrain.data.packing.resume_record import Plan, ShardRecord, make_record, read_record, write_record
from hpctrain.data.packing.token_documents import Documents, read_stream
from hpctrain.data.sources.row_source import Rows
from hpctrain.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with (done, total) samples of all ranks after each shard; total is None when it is not known."""

DOCUMENTS_DATASET = "documents"


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """What goes into one shard. beside: datasets that are no fields."""

    samples: int
    fields: Mapping[str, FieldSpec]
    arrays: Mapping[str, NDArray[Any]]
    beside: Mapping[str, NDArray[Any]]


class ShardMaker(Protocol):
    """The shards of one rank, one after the other: `begin`, then `make` or `skip`, until there is none."""

    def begin(self) -> str | None:
        """File name of the next shard; None after the last."""

    def make(self) -> ShardContent:
        """The content of the shard that was begun. Raises DataError."""

    def skip(self, samples: int) -> None:
        """Go behind the shard that was begun, which has so many samples and is there already."""


class RowShards:
    """Shards of `shard_samples` samples of `rows`."""

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
        return ShardContent(samples=len(positions), fields=self._rows.fields, arrays=arrays, beside={})

    def skip(self, samples: int) -> None:
        self._next += self._num_ranks

    @property
    def _start(self) -> int:
        return self._next * self._shard_samples


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Which windows of a stream of documents each shard holds: a stretch of tokens with whole windows.

    first: first token of each shard, stop: the token behind its last; counts: windows of each.
    starts: where each window of the dataset begins, counted from the first token of its shard; None if that
    is just the stride.
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
    """Cut a stream into shards of at most `shard_tokens` tokens (one window at least). Raises DataError.

    split: no window crosses the beginning of a document; documents shorter than window + 1 are left out.
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
    """Needs memory for the shards, not for the windows."""
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
    """Shards of token windows of `documents`, each with a dataset of where documents begin in it."""

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
            beside={DOCUMENTS_DATASET: inside.astype(np.int64)},
        )

    def skip(self, samples: int) -> None:
        self._next += self._num_ranks


def make_shards(
    maker: ShardMaker, *, directory: Path, plan: Plan, block_bytes: int, compression: ShardCompression | None
) -> Iterator[ShardRecord]:
    """Write the shards of one rank; those that an earlier packing of the same plan finished are kept."""
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
                beside=content.beside,
                block_bytes=block_bytes,
                compression=compression,
            )
            named = {} if TOKENS_FIELD in content.arrays and content.beside else content.arrays
            record = make_record(entry, fields=content.fields, arrays=named)
            write_record(directory, record, plan=plan)
        yield record


def write_together(
    records: Iterator[ShardRecord], *, comm: Collective, total: int | None, progress: Progress | None
) -> list[str]:
    """Run every rank's iterator to its end, a shard at a time; file names of all ranks' shards. Collective.

    An error of one rank is raised on all after the shard that they are at.
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
