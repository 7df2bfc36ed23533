"""Collective reading: all ranks read their parts of a global batch together, through MPI-IO.

Collective reading is for filesystems that serve few large requests better than many small requests, and for orders that
read whole blocks. MPI gets the requests of all ranks for a file at once, and can combine them (two-phase I/O).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import CollectiveFiles, ReduceOp, World, agreed, check_same, raise_together
from hpctrain.data.format.manifest import FieldSpec, Manifest, ShardEntry
from hpctrain.data.format.shard_file import read_bytes
from hpctrain.data.reading.dataset import Dataset
from hpctrain.errors import DataError, HpctrainError

# MPI counts are 32-bit: a rank reads at most this number of bytes of a file in one operation.
_ROUND_BYTES = 1 << 30
_COMPARED_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRanges:
    """Byte ranges of a file that a rank reads, which are disjoint and together contain all requested pieces.

    A piece is the data of one field of one sample.

    Attributes:
        offsets: File offset of each range in bytes: int64, shape (n,), ascending.
        lengths: Length of each range in bytes: int64, shape (n,).
        places: Offset in bytes of each requested piece in the concatenation of all ranges: int64, shape (number of
            pieces,).
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def rounds(self, *, max_bytes: int = _ROUND_BYTES) -> list[list[tuple[int, int]]]:
        """Divides the byte ranges into portions of at most `max_bytes` bytes, each a list of (offset, length).

        A range that does not fit into the rest of a portion is divided.
        """
        portions: list[list[tuple[int, int]]] = []
        free_bytes = 0
        for offset, length in zip(self.offsets.tolist(), self.lengths.tolist(), strict=True):
            while length:
                if free_bytes == 0:
                    portions.append([])
                    free_bytes = max_bytes
                part = min(length, free_bytes)
                portions[-1].append((offset, part))
                offset, length, free_bytes = offset + part, length - part, free_bytes - part
        return portions


def merge_pieces(starts: NDArray[np.int64], *, lengths: NDArray[np.int64]) -> ByteRanges:
    """Merges pieces of a file that touch or overlap, and returns the resulting byte ranges. Pure.

    `starts` are the file offsets of the pieces and `lengths` their lengths, in bytes: int64, shape (n,), in any order.
    """
    if not len(starts):
        nothing = np.empty(0, dtype=np.int64)
        return ByteRanges(offsets=nothing, lengths=nothing, places=nothing)
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    is_first = np.concatenate([[True], begins[1:] > ends[:-1]])
    offsets = begins[is_first]
    last = np.concatenate([np.flatnonzero(is_first)[1:] - 1, [len(begins) - 1]])
    joined = ends[last] - offsets
    joined_starts = np.concatenate([[0], np.cumsum(joined)[:-1]])
    inside = np.searchsorted(offsets, starts, side="right") - 1
    return ByteRanges(
        offsets=offsets, lengths=joined, places=joined_starts[inside] + starts - offsets[inside]
    )


@final
class CollectiveDataset:
    """A dataset that all ranks read together: `gather` is collective over all ranks. Create it with `open`.

    A loader with this dataset makes each batch only when it is requested, on every rank at the same step. So no rank
    reads ahead of the other ranks, and an epoch can be left early.
    """

    collective: Final = True

    def __init__(self, *, world: World, dataset: Dataset, files: CollectiveFiles) -> None:
        """Do not call this; use `open`."""
        self.dataset = dataset
        self._world = world
        self._files: CollectiveFiles | None = files
        manifest = dataset.manifest
        self._starts = np.concatenate(
            [[0], np.cumsum([shard.samples for shard in manifest.shards], dtype=np.int64)]
        ).astype(np.int64)

    @classmethod
    def open(cls, world: World, dataset: Dataset) -> CollectiveDataset:
        """Opens the files of a dataset for collective reads. Collective over all ranks of the run.

        Args:
            world: All ranks of the run.
            dataset: The dataset, opened on every rank.

        Returns:
            The dataset to pass to the loader. Call its `close` at the end.

        Raises:
            DataError: On every rank, if a field is not a contiguous array, if the samples are token windows that are
                split at documents, if `dataset` has a checker, if the ranks have different datasets, or if the backend
                does not use MPI.
        """
        agreed(world, lambda: _check_readable(dataset), os_error=DataError)
        check_same(
            world, name="the dataset to read together", value=dataset.manifest.fingerprint, error=DataError
        )
        files = world.collective_files()
        if files is None:
            raise DataError(
                f"collective reading needs MPI, which the backend {world.backend} does not use: start the run with "
                'mpirun or srun, or set io = "read"',
                agreed=True,
            )
        return cls(world=world, dataset=dataset, files=files)

    @property
    def num_samples(self) -> int:
        return self.dataset.num_samples

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self.dataset.fields

    @property
    def manifest(self) -> Manifest:
        return self.dataset.manifest

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Reads samples by index, as `Dataset.gather` does, on all ranks together. Collective over all ranks.

        Args:
            indices: Indices in the dataset of this rank's samples: int64, shape (n,). n may be 0, and may differ
                between ranks.
            out: Arrays to fill instead of new ones, by field name, for some or all fields.

        Returns:
            For each field an array of shape (n, *sample_shape).

        Raises:
            DataError: On every rank, if an index is out of range, if a file is missing or has not the size in the
                manifest, or if MPI returned wrong bytes.
            CommunicationError: On every rank, if MPI fails.
        """
        if self._files is None:
            raise DataError("samples were requested from a dataset that is closed")
        indices = np.asarray(indices, dtype=np.int64)
        error: HpctrainError | None = None
        needed: dict[int, tuple[NDArray[np.int64], ByteRanges]] = {}
        try:
            needed = self._plan(indices)
        except HpctrainError as caught:
            error = caught
        raise_together(self._world, error)

        portions = {number: byte_ranges.rounds() for number, (_, byte_ranges) in needed.items()}
        num_rounds = torch.zeros(len(self.manifest.shards), dtype=torch.int32)
        for number, rounds in portions.items():
            num_rounds[number] = len(rounds)
        # Every rank takes part in every read of any rank, if necessary with an empty request.
        self._world.all_reduce(num_rounds, op=ReduceOp.MAX)

        arrays, stored = self.dataset.decoder.arrays(len(indices), out=out)
        for number in np.flatnonzero(num_rounds.numpy()).tolist():
            places, byte_ranges = needed.get(number, (None, None))
            buffer = np.zeros(byte_ranges.num_bytes if byte_ranges else 0, dtype=np.uint8)
            filled = 0
            for turn in range(int(num_rounds[number])):
                mine = portions.get(number, [])
                portion = mine[turn] if turn < len(mine) else []
                num_bytes = sum(length for _, length in portion)
                self._files.read(
                    self._path(self.manifest.shards[number]),
                    offsets=[offset for offset, _ in portion],
                    lengths=[length for _, length in portion],
                    out=buffer[filled : filled + num_bytes],
                )
                try:
                    if portion and error is None:
                        self._check_end(
                            self.manifest.shards[number],
                            portion=portion,
                            read=buffer[filled : filled + num_bytes],
                        )
                except DataError as caught:
                    error = caught  # raised after the last read, since the other ranks continue with the next shard
                filled += num_bytes
            if places is not None and byte_ranges is not None:
                self._unpack(number, buffer, byte_ranges=byte_ranges, places=places, arrays=stored)
        try:
            if error is None:
                groups = [(number, places) for number, (places, _) in needed.items()]
                self.dataset.decoder.decode(stored, arrays, groups=groups)
        except DataError as caught:
            error = caught
        raise_together(self._world, error)
        return arrays

    def _check_end(
        self, entry: ShardEntry, *, portion: list[tuple[int, int]], read: NDArray[np.uint8]
    ) -> None:
        """Compares the end of what MPI has read with the bytes in the file. Raises DataError if they differ.

        `portion` lists the byte ranges (offset, length) that were read, and `read` contains their bytes. Faulty modules
        of Open MPI omit bytes at the end of a read.
        """
        offset, length = portion[-1]
        length = min(length, _COMPARED_BYTES)
        offset += portion[-1][1] - length
        try:
            descriptor = os.open(self._path(entry), os.O_RDONLY | os.O_CLOEXEC)
            try:
                expected = read_bytes(descriptor, length, offset=offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"shard {self._path(entry)} cannot be read: {error}") from error
        if read[len(read) - length :].tobytes() != expected:
            raise DataError(
                f"MPI reported that it read bytes {offset} to {offset + length - 1} of {self._path(entry)} on rank "
                f"{self._world.rank}, but returned others. This is a known error of Open MPI's modules vulcan and "
                "dynamic: set "
                'OMPI_MCA_fcoll=^vulcan,dynamic,dynamic_gen2 before the start, or io = "read"'
            )

    def _plan(self, indices: NDArray[np.int64]) -> dict[int, tuple[NDArray[np.int64], ByteRanges]]:
        """Finds out what to read for the samples `indices`. Returns a dict by index of the shard.

        For each shard it contains the batch rows of the shard's samples, and the byte ranges to read from the shard's
        file.
        """
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise DataError(
                f"samples {indices.min()} to {indices.max()} were requested from {self.dataset.directory}, "
                f"which has samples 0 to {self.num_samples - 1}"
            )
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        needed = {}
        for number in np.unique(shard_of).tolist():
            entry = self.manifest.shards[number]
            self._check_size(entry)
            places = np.flatnonzero(shard_of == number)
            rows = indices[places] - self._starts[number]
            starts, lengths = [], []
            for name in self.dataset.decoder.stored_fields:
                first, step, width = _bytes_of_rows(self.manifest, entry=entry, name=name)
                starts.append(first + rows * step)
                lengths.append(np.full(len(rows), width, dtype=np.int64))
            needed[number] = (places, merge_pieces(np.concatenate(starts), lengths=np.concatenate(lengths)))
        return needed

    def _check_size(self, entry: ShardEntry) -> None:
        """Raises DataError if the file of a shard does not have the size that the manifest states.

        MPI-IO (Open MPI 4.1) would report success for reads beyond the end of a file.
        """
        path = self._path(entry)
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"shard {path} cannot be read: {error}") from error
        if found != entry.file_bytes:
            raise DataError(
                f"shard {path} has {found} bytes, the manifest says {entry.file_bytes}: copy it again, or pack "
                "again"
            )

    def _path(self, entry: ShardEntry) -> Path:
        return self.dataset.directory / entry.file

    def _unpack(
        self, number: int, buffer: NDArray[np.uint8], *, byte_ranges: ByteRanges, places: NDArray[np.int64],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:  # fmt: skip
        entry = self.manifest.shards[number]
        for index, (name, spec) in enumerate(self.dataset.decoder.stored_fields.items()):
            dtype = np.dtype(spec.dtype).newbyteorder(">" if entry.fields[name].big_endian else "<")
            begins = byte_ranges.places[index * len(places) : (index + 1) * len(places)]
            for place, begin in zip(places.tolist(), begins.tolist(), strict=True):
                arrays[name][place] = np.ndarray(spec.shape, dtype=dtype, buffer=buffer, offset=begin)

    def close(self) -> None:
        """Closes the files. Collective over all ranks. May be called more than once."""
        if self._files is not None:
            files, self._files = self._files, None
            files.close()


def _bytes_of_rows(manifest: Manifest, *, entry: ShardEntry, name: str) -> tuple[int, int, int]:
    """Returns where the samples of the field `name` are in a shard's file: three numbers of bytes.

    The numbers are the file offset of the first sample, the distance between the starts of samples, and the size of a
    sample.
    """
    stored, spec = entry.fields[name], manifest.fields[name]
    assert stored.offset is not None  # checked by `open`
    if manifest.tokens is None:
        skipped = 0 if stored.whole else stored.first_row * spec.sample_bytes
        return stored.offset + skipped, spec.sample_bytes, spec.sample_bytes
    itemsize = np.dtype(spec.dtype).itemsize
    first = stored.offset + stored.first_row * itemsize
    return first, manifest.tokens.stride * itemsize, spec.sample_bytes


def _check_readable(dataset: Dataset) -> None:
    manifest = dataset.manifest
    if dataset.checker is not None:
        raise DataError('collective reading does not check hashes: set check = "off", or io = "read"')
    if manifest.is_split:
        raise DataError(
            'collective reading does not support windows that are split at documents: set io = "read"'
        )
    for name, spec in manifest.fields.items():
        if spec.kind != "array":
            raise DataError(
                f'field {name!r} of kind {spec.kind} cannot be read collectively: set io = "read"'
            )
    for entry in manifest.shards:
        for name, stored in entry.fields.items():
            if stored.offset is None:
                raise DataError(
                    f"field {name!r} of shard {entry.file} is not contiguous (chunked or compressed), so it cannot be "
                    'read collectively: set io = "read"'
                )
