"""A dataset in the memory of all ranks, which is read from the filesystem only once.

Each rank holds a contiguous part of the samples in memory that all ranks may read (MPI one-sided reads). A rank can
read any samples, and the rank that holds them need not take part.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm import RemoteMemory, World, agreed, check_same
from hpctrain.data.format.manifest import FieldSpec
from hpctrain.data.loading.loader import Samples
from hpctrain.data.order.epoch_order import PositionRange, rank_share
from hpctrain.errors import DataError, HpctrainError

Progress = Callable[[int, int], None]
"""Function that is called with two numbers of samples: those that this rank has read, and those of its whole part."""

_LINE_BYTES = 64
_FILL_BYTES = 8 << 20
# Maximum number of reads in flight: enough to hide the network's latency.
_READS_IN_FLIGHT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """dtype, and shape in one sample, of an array that is held in memory.

    The array contains a field of all samples, or the lengths of a ragged field (samples of different lengths).
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLayout:
    """States which rank holds which samples of a dataset in memory, and at which offsets. Pure.

    Each rank holds a contiguous share of the samples; the sizes of the shares differ by at most one sample. In the
    memory of a rank the arrays follow one after another, each aligned to a cache line.
    """

    arrays: Mapping[str, Stored]
    num_samples: int
    num_ranks: int

    def share(self, rank: int) -> PositionRange:
        return rank_share(0, self.num_samples, rank=rank, num_ranks=self.num_ranks)

    def num_bytes(self, rank: int) -> int:
        """Returns the number of bytes that the samples held by `rank` take in its memory."""
        return self._place(rank, name=None)

    def offset(self, rank: int, *, name: str) -> int:
        """Returns the offset in bytes, in the memory of `rank`, of the array called `name`: a field, or its lengths."""
        return self._place(rank, name=name)

    def _place(self, rank: int, *, name: str | None) -> int:
        samples, place = self.share(rank).num_samples, 0
        for each, stored in self.arrays.items():
            if each == name:
                break
            place += -(-samples * stored.row_bytes // _LINE_BYTES) * _LINE_BYTES
        return place

    def holders(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns for each sample the rank that holds it in memory: int64, shape (n,).

        `indices` are the indices of the samples in the dataset: integers, shape (n,).
        """
        share, extra = divmod(self.num_samples, self.num_ranks)
        larger = extra * (share + 1)
        return np.where(
            indices < larger, indices // (share + 1), extra + (indices - larger) // max(1, share)
        ).astype(np.int64)


def runs(indices: NDArray[np.int64], *, holders: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Divides `indices` into runs of consecutive samples that one rank holds. A run can be read at once. Pure.

    Yields (start, stop) of each run: the run consists of indices[start:stop]. `holders` contains, for each sample, the
    rank that holds it.
    """
    broken = (np.diff(indices) != 1) | (np.diff(holders) != 0)
    edges = [0, *(np.flatnonzero(broken) + 1).tolist(), len(indices)]
    yield from itertools.pairwise(edges)


@final
class MemoryStore:
    """A dataset whose samples are in the memory of all ranks. Create it with `load` and pass it to a loader.

    `gather` is thread-safe and not collective. `load` and `close` are collective.
    """

    is_thread_safe: Final = True

    def __init__(self, *, world: World, source: Samples, memory: RemoteMemory, layout: StoreLayout) -> None:
        """Do not call this; use `load`."""
        self.source = source
        self.layout = layout
        self._world = world
        self._memory: RemoteMemory | None = memory
        self._places: dict[int, tuple[int, dict[str, int]]] = {}
        self._idle = threading.Condition()
        self._gathers = 0
        self._local = _views(memory.local, layout=layout, rank=world.rank)

    @classmethod
    def load(cls, world: World, dataset: Samples, *, progress: Progress | None = None) -> MemoryStore:
        """Reads the samples of a dataset into memory, each rank its own part. Collective over all ranks of the run.

        The memory contains samples in the form that they have in a batch: ragged fields are padded, and each of
        several overlapping token windows is stored completely.

        Args:
            world: All ranks of the run.
            dataset: The dataset, opened on every rank.
            progress: Called with the number of samples that this rank has read so far, and with the number of samples
                of this rank's part; None: not called.

        Returns:
            The dataset to pass to the loader. Call its `close` at the end.

        Raises:
            DataError: On every rank, if a part cannot be read, if the ranks have different datasets, or if the
                backend has no one-sided reads.
            CommunicationError: On every rank, if a node has too little memory.
        """
        layout = agreed(world, lambda: _layout(dataset, num_ranks=world.num_ranks), os_error=DataError)
        described = {name: [str(s.dtype), list(s.shape)] for name, s in layout.arrays.items()}
        check_same(
            world, name="the dataset for the memory store", value=[layout.num_samples, described],
            error=DataError,
        )  # fmt: skip
        memory = world.remote_memory(layout.num_bytes(world.rank))
        if memory is None:
            raise DataError(
                f"the memory store needs MPI, which the backend {world.backend} does not use: start the run with "
                "mpirun or srun, or do not use the memory store",
                agreed=True,
            )
        store = cls(world=world, source=dataset, memory=memory, layout=layout)
        try:
            agreed(world, lambda: store._fill(progress), os_error=DataError)
        except HpctrainError:
            store.close()  # collective: the error was raised on every rank
            raise
        memory.publish()
        return store

    def _fill(self, progress: Progress | None) -> None:
        share = self.layout.share(self._world.rank)
        sample_bytes = max(1, sum(stored.row_bytes for stored in self.layout.arrays.values()))
        step = max(1, _FILL_BYTES // sample_bytes)
        for start in range(share.start, share.stop, step):
            stop = min(start + step, share.stop)
            rows = slice(start - share.start, stop - share.start)
            out = {name: view[rows] for name, view in self._local.items()}
            found = self.source.gather(np.arange(start, stop, dtype=np.int64), out=out)
            for name, view in out.items():
                if found[name] is not view:
                    view[...] = found[name]
            if progress is not None:
                progress(stop - share.start, share.num_samples)

    @property
    def num_samples(self) -> int:
        return self.layout.num_samples

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self.source.fields

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Reads samples by index from the memory of all ranks. Returns the same as `Dataset.gather`. Not collective.

        Args:
            indices: Indices of the samples in the dataset: int64, shape (n,).
            out: Arrays to fill instead of new ones, by field name, for some or all fields.

        Returns:
            For each field an array of shape (n, *sample_shape).

        Raises:
            DataError: If an index is out of range, or if the store is closed.
            CommunicationError: If a read from another rank fails.
        """
        with self._idle:
            memory = self._memory
            if memory is None:
                raise DataError("samples were requested from a memory store that is closed")
            self._gathers += 1
        try:
            return self._gather(memory, indices, given=out or {})
        finally:
            with self._idle:
                self._gathers -= 1
                self._idle.notify_all()

    def _gather(
        self, memory: RemoteMemory, indices: NDArray[np.int64], *, given: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise DataError(
                f"samples {indices.min()} to {indices.max()} were requested from a memory store, "
                f"which has samples 0 to {self.num_samples - 1}"
            )
        arrays, filled = {}, {}
        for name, stored in self.layout.arrays.items():
            new = np.empty((len(indices), *stored.shape), stored.dtype) if name not in given else None
            arrays[name] = given[name] if new is None else new
            # Reads write directly into the batch if its memory is contiguous.
            filled[name] = (
                arrays[name] if arrays[name].flags.c_contiguous else np.empty_like(arrays[name], order="C")
            )
        if len(indices):
            try:
                self._copy(memory, indices, arrays=filled)
            except BaseException:
                with contextlib.suppress(Exception):
                    memory.flush()  # reads in flight write into memory that would be freed
                raise
        for name, array in arrays.items():
            if filled[name] is not array:
                array[...] = filled[name]
        return arrays

    def _copy(
        self, memory: RemoteMemory, indices: NDArray[np.int64], *, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        mine = self._world.rank
        holders = self.layout.holders(indices)
        begun = 0
        flat = [(name, array.reshape(len(indices), -1).view(np.uint8)) for name, array in arrays.items()]
        for start, stop in runs(indices, holders=holders):
            holder = int(holders[start])
            if holder == mine:
                continue
            first, offsets = self._place(holder)
            row = int(indices[start]) - first
            for name, rows_of in flat:
                piece = rows_of[start:stop].reshape(-1)
                memory.get(holder, offset=offsets[name] + row * rows_of.shape[1], out=piece)
                begun += 1
            if begun >= _READS_IN_FLIGHT:
                memory.flush()
                begun = 0
        # The samples of this rank are copied while the reads are in flight.
        here = np.flatnonzero(holders == mine)
        rows = indices[here] - self.layout.share(mine).start
        for name, array in arrays.items():
            if len(here) == len(indices):
                np.take(self._local[name], rows, axis=0, out=array, mode="clip")
            elif len(here):
                array[here] = self._local[name][rows]
        if begun:
            memory.flush()

    def _place(self, holder: int) -> tuple[int, dict[str, int]]:
        """Returns the first sample that rank `holder` holds, and the offset in bytes of each array in its memory."""
        place = self._places.get(holder)
        if place is None:
            offsets = {name: self.layout.offset(holder, name=name) for name in self.layout.arrays}
            place = self._places[holder] = (self.layout.share(holder).start, offsets)
        return place

    def close(self) -> None:
        """Frees the memory, after all calls of `gather` on this rank have ended.

        Collective over all ranks. May be called more than once.
        """
        with self._idle:
            if self._memory is None:
                return
            memory, self._memory = self._memory, None
            while self._gathers:
                self._idle.wait()
        # Other ranks may still be reading this rank's memory; the barrier is subject to the run's time limit.
        self._world.barrier()
        self._local = {}
        memory.close()


def _layout(dataset: Samples, *, num_ranks: int) -> StoreLayout:
    """Returns which samples of `dataset` each of `num_ranks` ranks holds in memory, and at which offsets.

    The arrays are those that `dataset.gather` returns: the fields, and the lengths of ragged fields.
    """
    first = dataset.gather(np.zeros(1, dtype=np.int64))
    arrays = {name: Stored(dtype=array.dtype, shape=tuple(array.shape[1:])) for name, array in first.items()}
    return StoreLayout(arrays=arrays, num_samples=dataset.num_samples, num_ranks=num_ranks)


def _views(memory: NDArray[np.uint8], *, layout: StoreLayout, rank: int) -> dict[str, NDArray[Any]]:
    """Returns a view of each array in the memory of `rank`, of shape (number of samples of the rank, *sample_shape)."""
    samples = layout.share(rank).num_samples
    views = {}
    for name, stored in layout.arrays.items():
        start = layout.offset(rank, name=name)
        part = memory[start : start + samples * stored.row_bytes]
        views[name] = part.view(stored.dtype).reshape(samples, *stored.shape)
    return views
