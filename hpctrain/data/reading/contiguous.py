"""Reads contiguous HDF5 datasets at their file offset: through a memory map, or with preadv into the batch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.layout import DatasetLayout
from hpctrain.data.reading.field_reader import ROW_COPY_BYTES, FieldName, OpenFile, ReadRequest, ReadTask

# Buffers of one preadv; POSIX guarantees 16, Linux accepts 1024.
_MAX_BUFFERS = 512
# Gaps between samples up to this size are read too: another system call would cost as much.
_GAP_BYTES = 8192
# Samples of this size are read in a task each: one core cannot use the whole memory bandwidth.
_TASK_BYTES = 512 << 10


class MappedField:
    """Reads a field by copying samples from a memory map. A page that cannot be read kills the process with SIGBUS."""

    def __init__(self, mapped: mmap.mmap, *, layout: DatasetLayout) -> None:
        self._rows: NDArray[Any] = np.ndarray(
            layout.shape or (1,), dtype=layout.dtype, buffer=mapped, offset=layout.offset or 0
        )

    def begin(self, request: ReadRequest) -> Sequence[ReadTask]:
        rows, starts, target = self._rows, request.starts, request.target
        extent = request.rows_per_sample
        if extent == 1:
            target = target.reshape(len(target), *target.shape[2:])
            if request.places is None and rows.dtype == target.dtype:
                # mode: the row numbers were checked before, and "raise" would gather into a temporary buffer.
                np.take(rows, starts, axis=0, out=target, mode="clip")
                return ()
            view = rows
        else:
            # shape (first rows, extent, *rest); the samples may overlap
            view = np.lib.stride_tricks.as_strided(
                rows,
                shape=(max(0, len(rows) - extent + 1), extent, *rows.shape[1:]),
                strides=(rows.strides[0], *rows.strides),
                writeable=False,
            )
        if request.sample_bytes >= ROW_COPY_BYTES:
            pairs = zip(request.all_places.tolist(), starts.tolist(), strict=True)
            if request.sample_bytes >= _TASK_BYTES:
                return [partial(_copy, view, target, start, place) for place, start in pairs]
            for place, start in pairs:
                target[place] = view[start]
        else:
            target[slice(None) if request.places is None else request.places] = view[starts]
        return ()


def _copy(view: NDArray[Any], target: NDArray[Any], start: int, place: int) -> None:
    target[place] = view[start]


class ReadField:
    """Reads a field with preadv directly into the batch. Samples that are adjacent in the file are read in one call."""

    def __init__(self, file: OpenFile, *, layout: DatasetLayout, name: FieldName) -> None:
        self._file = file
        self._first_byte = layout.offset or 0
        self._row_bytes = int(np.prod(layout.shape[1:], dtype=np.int64)) * layout.dtype.itemsize
        self._swap = not layout.dtype.isnative and layout.dtype.itemsize > 1
        self._name = name

    def begin(self, request: ReadRequest) -> Sequence[ReadTask]:
        offsets = self._first_byte + request.starts * self._row_bytes
        places = request.all_places
        order = np.argsort(offsets, kind="stable")
        offsets, places = offsets[order], places[order]
        samples = request.samples[order]
        if request.sample_bytes >= _TASK_BYTES:
            return [
                partial(
                    self._scatter,
                    request,
                    offsets=offsets[number : number + 1],
                    places=places[number : number + 1],
                    samples=samples[number : number + 1],
                )
                for number in range(len(order))
            ]
        if request.sample_bytes >= ROW_COPY_BYTES:
            self._scatter(request, offsets=offsets, places=places, samples=samples)
        else:
            self._through_buffers(request, offsets=offsets, places=places, samples=samples)
            self._swap_bytes(request, places)
        return ()

    def _swap_bytes(self, request: ReadRequest, places: NDArray[np.int64]) -> None:
        if self._swap:
            for place in places.tolist():
                request.target[place].byteswap(inplace=True)

    def _scatter(
        self,
        request: ReadRequest,
        *,
        offsets: NDArray[np.int64],
        places: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> None:
        """Reads the samples of a request. Samples that are adjacent in the file are read by one preadv call.

        `offsets` are the file offsets of the samples in bytes, ascending; `places` are the batch rows to fill, and
        `samples` the indices of the samples in the shard.
        """
        num_bytes = request.sample_bytes
        whole = request.target.reshape(-1).view(np.uint8).data
        ends = [*(np.flatnonzero(np.diff(offsets) != num_bytes) + 1).tolist(), len(offsets)]
        place_list, offset_list = places.tolist(), offsets.tolist()
        if len(ends) == len(offsets):
            self._one_by_one(
                whole, num_bytes=num_bytes, offsets=offset_list, places=place_list, samples=samples
            )
            self._swap_bytes(request, places)
            return
        start = 0
        for stop in ends:
            while start < stop:
                end = min(stop, start + _MAX_BUFFERS)
                parts = [whole[p * num_bytes : (p + 1) * num_bytes] for p in place_list[start:end]]
                self._read(
                    parts,
                    num_bytes=(end - start) * num_bytes,
                    offset=offset_list[start],
                    samples=samples[start:end],
                )
                start = end
        self._swap_bytes(request, places)

    def _one_by_one(
        self,
        whole: memoryview,
        *,
        num_bytes: int,
        offsets: list[int],
        places: list[int],
        samples: NDArray[np.int64],
    ) -> None:
        """Reads each sample with one preadv call. No two samples are adjacent in the file. Optimized for speed.

        Most shuffled batches are of this kind. `whole` is the memory of the batch as bytes, and `num_bytes` the size of
        a sample. `offsets` are the file offsets of the samples, `places` the batch rows to fill.
        """
        descriptor, preadv = self._file.descriptor, os.preadv
        for number, (place, offset) in enumerate(zip(places, offsets, strict=True)):
            part = whole[place * num_bytes : (place + 1) * num_bytes]
            try:
                is_whole = preadv(descriptor, [part], offset) == num_bytes
            except OSError:
                is_whole = False
            if not is_whole:
                self._read([part], num_bytes=num_bytes, offset=offset, samples=samples[number : number + 1])

    def _through_buffers(
        self,
        request: ReadRequest,
        *,
        offsets: NDArray[np.int64],
        places: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> None:
        """Reads small samples of a request through temporary buffers.

        Samples that are separated by small gaps in the file are read together with the gaps, by one call, and are then
        copied into the batch.
        """
        num_bytes = request.sample_bytes
        flat = request.target.reshape(len(request.target), -1).view(np.uint8)
        ends = [*(np.flatnonzero(np.diff(offsets) > num_bytes + _GAP_BYTES) + 1).tolist(), len(offsets)]
        start = 0
        for stop in ends:
            begin = int(offsets[start])
            byte_range = np.empty(int(offsets[stop - 1]) + num_bytes - begin, dtype=np.uint8)
            self._read(
                [byte_range.data], num_bytes=len(byte_range), offset=begin, samples=samples[start:stop]
            )
            # shape (possible first bytes, bytes of a sample); the windows overlap
            windows: NDArray[np.uint8] = np.ndarray(
                (len(byte_range) - num_bytes + 1, num_bytes), np.uint8, buffer=byte_range, strides=(1, 1)
            )
            flat[places[start:stop]] = windows[offsets[start:stop] - begin]
            start = stop

    def _read(
        self, parts: list[memoryview], *, num_bytes: int, offset: int, samples: NDArray[np.int64]
    ) -> None:
        """Fills the buffers `parts`, of `num_bytes` bytes in all, with the file's bytes from `offset` on.

        Continues after a short read. Raises DataError that names `samples`, the indices of the samples in the shard, if
        the file ends before the buffers are full.
        """
        missing = num_bytes
        while missing:
            try:
                count = os.preadv(self._file.descriptor, parts, offset)
            except OSError as error:
                raise self._name.error(samples, error.strerror or error) from error
            if count == missing:
                return
            if count == 0:
                raise self._name.error(
                    samples,
                    f"the file ends {missing} bytes before the end of these samples: copy the file again, or pack "
                    "again",
                )
            missing -= count
            offset += count
            while count >= len(parts[0]):
                count -= len(parts[0])
                parts = parts[1:]
            parts = [parts[0][count:], *parts[1:]]
