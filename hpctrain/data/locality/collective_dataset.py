"""All ranks read their parts of a global batch together, through collective MPI-IO.

For filesystems that serve few large requests better than many small ones, and for orders that read whole
blocks. MPI sees all requests for a file at once, and may read what lies between them only once.
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

from hpctrain.comm.collectives.agreement import agreed, check_same, raise_together
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import ReduceOp, World
from hpctrain.data.format.manifest import FieldSpec, Manifest, ShardEntry
from hpctrain.data.format.shard_file import read_fully
from hpctrain.data.reading.dataset import Dataset
from hpctrain.errors import DataError, HpctrainError

# MPI counts are 32-bit: a rank reads at most this of a file in one operation.
_ROUND_BYTES = 1 << 30
_COMPARED_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretches:
    """What a rank needs of a file, each byte once.

    offsets, lengths: ascending stretches of the file, apart from each other, shape (n,). places: where each
    piece that was asked for begins in the stretches laid end to end.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def rounds(self, *, max_bytes: int = _ROUND_BYTES) -> list[list[tuple[int, int]]]:
        """The stretches (offset, length) in portions of at most `max_bytes`; long ones are cut."""
        portions: list[list[tuple[int, int]]] = []
        room = 0
        for offset, length in zip(self.offsets.tolist(), self.lengths.tolist(), strict=True):
            while length:
                if room == 0:
                    portions.append([])
                    room = max_bytes
                part = min(length, room)
                portions[-1].append((offset, part))
                offset, length, room = offset + part, length - part, room - part
        return portions


def merge_pieces(starts: NDArray[np.int64], *, lengths: NDArray[np.int64]) -> Stretches:
    """Join pieces of a file that touch or overlap, in any order. starts, lengths: shape (n,). Pure."""
    if not len(starts):
        nothing = np.empty(0, dtype=np.int64)
        return Stretches(offsets=nothing, lengths=nothing, places=nothing)
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    is_first = np.concatenate([[True], begins[1:] > ends[:-1]])
    offsets = begins[is_first]
    last = np.concatenate([np.flatnonzero(is_first)[1:] - 1, [len(begins) - 1]])
    joined = ends[last] - offsets
    laid = np.concatenate([[0], np.cumsum(joined)[:-1]])
    inside = np.searchsorted(offsets, starts, side="right") - 1
    return Stretches(offsets=offsets, lengths=joined, places=laid[inside] + starts - offsets[inside])


@final
class CollectiveDataset:
    """A dataset whose `gather` all ranks call together; a `Samples` for the loader.

    The loader sees `collective` and makes each batch when the loop asks for it, on every rank at the same
    step: no batch is read ahead by one rank only, and none has to be taken back where an epoch is left early.
    """

    collective: Final = True

    def __init__(self, *, world: World, dataset: Dataset, files: CollectiveFiles) -> None:
        """Use `open`."""
        self.dataset = dataset
        self._world = world
        self._files: CollectiveFiles | None = files
        manifest = dataset.manifest
        self._starts = np.concatenate(
            [[0], np.cumsum([shard.samples for shard in manifest.shards], dtype=np.int64)]
        ).astype(np.int64)

    @classmethod
    def open(cls, world: World, dataset: Dataset) -> CollectiveDataset:
        """Collective over all ranks of the run.

        Raises DataError on every rank: for chunked, ragged or otherwise scattered data, for a checker that
        looks at blocks while reading, and for a backend without MPI.
        """
        agreed(world, lambda: _check_readable(dataset), os_error=DataError)
        check_same(
            world, name="the dataset to read together", value=dataset.manifest.fingerprint, error=DataError
        )
        files = world.collective_files()
        if files is None:
            raise DataError(
                f"reading together needs MPI, the backend {world.backend} runs without it: start the run with "
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
        """As `Dataset.gather`, for all ranks at once: collective, each with its own samples, or with none.

        Raises on every rank what any rank met: DataError for an index outside, a file that is missing or has
        another size, and bytes that are not the file's; CommunicationError where MPI fails.
        """
        if self._files is None:
            raise DataError("samples were asked of a dataset that is closed")
        indices = np.asarray(indices, dtype=np.int64)
        error: HpctrainError | None = None
        needed: dict[int, tuple[NDArray[np.int64], Stretches]] = {}
        try:
            needed = self._plan(indices)
        except HpctrainError as caught:
            error = caught
        raise_together(self._world, error)

        portions = {number: stretches.rounds() for number, (_, stretches) in needed.items()}
        num_rounds = torch.zeros(len(self.manifest.shards), dtype=torch.int32)
        for number, rounds in portions.items():
            num_rounds[number] = len(rounds)
        # Every rank takes part in every reading of any rank, with nothing to read if need be.
        self._world.all_reduce(num_rounds, op=ReduceOp.MAX)

        given = out or {}
        arrays = {
            name: given[name] if name in given else np.empty((len(indices), *spec.shape), spec.dtype)
            for name, spec in self.fields.items()
        }
        for number in np.flatnonzero(num_rounds.numpy()).tolist():
            places, stretches = needed.get(number, (None, None))
            buffer = np.zeros(stretches.num_bytes if stretches else 0, dtype=np.uint8)
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
                    error = caught  # told when all have read: the others are on their way to the next shard
                filled += num_bytes
            if places is not None and stretches is not None:
                self._unpack(number, buffer, stretches=stretches, places=places, arrays=arrays)
        raise_together(self._world, error)
        return arrays

    def _check_end(
        self, entry: ShardEntry, *, portion: list[tuple[int, int]], read: NDArray[np.uint8]
    ) -> None:
        """Compare the end of what MPI read with the file: there Open MPI's faulty modules leave bytes out."""
        offset, length = portion[-1]
        length = min(length, _COMPARED_BYTES)
        offset += portion[-1][1] - length
        try:
            descriptor = os.open(self._path(entry), os.O_RDONLY | os.O_CLOEXEC)
            try:
                expected = read_fully(descriptor, length, offset=offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"shard {self._path(entry)} cannot be read: {error}") from error
        if read[len(read) - length :].tobytes() != expected:
            raise DataError(
                f"MPI says that it has read bytes {offset} to {offset + length - 1} of {self._path(entry)} on rank "
                f"{self._world.rank}, and gave others. Known of Open MPI's modules vulcan and dynamic: set "
                'OMPI_MCA_fcoll=two_phase,individual before the start, or io = "read"'
            )

    def _plan(self, indices: NDArray[np.int64]) -> dict[int, tuple[NDArray[np.int64], Stretches]]:
        """Shard -> places of its samples in the batch, and what is needed of its file."""
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise DataError(
                f"samples {indices.min()} to {indices.max()} were asked of {self.dataset.directory}, "
                f"which has 0 to {self.num_samples - 1}"
            )
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        needed = {}
        for number in np.unique(shard_of).tolist():
            entry = self.manifest.shards[number]
            self._check_size(entry)
            places = np.flatnonzero(shard_of == number)
            rows = indices[places] - self._starts[number]
            starts, lengths = [], []
            for name in self.fields:
                first, step, width = _bytes_of_rows(self.manifest, entry=entry, name=name)
                starts.append(first + rows * step)
                lengths.append(np.full(len(rows), width, dtype=np.int64))
            needed[number] = (places, merge_pieces(np.concatenate(starts), lengths=np.concatenate(lengths)))
        return needed

    def _check_size(self, entry: ShardEntry) -> None:
        """Look before each reading: MPI-IO (Open MPI 4.1 seen) says it has read what lies behind the end."""
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
        self, number: int, buffer: NDArray[np.uint8], *, stretches: Stretches, places: NDArray[np.int64],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:  # fmt: skip
        entry = self.manifest.shards[number]
        for index, (name, spec) in enumerate(self.fields.items()):
            dtype = np.dtype(spec.dtype).newbyteorder(">" if entry.fields[name].big_endian else "<")
            begins = stretches.places[index * len(places) : (index + 1) * len(places)]
            for place, begin in zip(places.tolist(), begins.tolist(), strict=True):
                arrays[name][place] = np.ndarray(spec.shape, dtype=dtype, buffer=buffer, offset=begin)

    def close(self) -> None:
        """Close the files. Collective. May be called again."""
        if self._files is not None:
            files, self._files = self._files, None
            files.close()


def _bytes_of_rows(manifest: Manifest, *, entry: ShardEntry, name: str) -> tuple[int, int, int]:
    """Of a field: place of the shard's first sample in the file, from sample to sample, bytes of one."""
    stored, spec = entry.fields[name], manifest.fields[name]
    assert stored.offset is not None  # checked when it was opened
    if manifest.tokens is None:
        skipped = 0 if stored.whole else stored.first_row * spec.sample_bytes
        return stored.offset + skipped, spec.sample_bytes, spec.sample_bytes
    itemsize = np.dtype(spec.dtype).itemsize
    first = stored.offset + stored.first_row * itemsize
    return first, manifest.tokens.stride * itemsize, spec.sample_bytes


def _check_readable(dataset: Dataset) -> None:
    manifest = dataset.manifest
    if getattr(dataset, "checker", None) is not None:
        raise DataError('reading together does not look at hashes: set check = "off", or io = "read"')
    if manifest.is_split:
        raise DataError('windows that end at documents are not read together: set io = "read"')
    for name, spec in manifest.fields.items():
        if spec.kind != "array":
            raise DataError(f'field {name!r} is of kind {spec.kind}, and not read together: set io = "read"')
    for entry in manifest.shards:
        for name, stored in entry.fields.items():
            if stored.offset is None:
                raise DataError(
                    f"field {name!r} of shard {entry.file} is not in one piece (chunked or compressed), and not "
                    'read together: set io = "read"'
                )
