"""A checkpoint file without its content: HDF5's own structures, and the file offsets of the content.

The HDF5 library creates the structures once per layout, in a sparse temporary file; a save then writes the structures
and the content with plain writes. So a save neither spends time in the library nor depends on its behaviour on a slow
or full filesystem. The metadata's text is prepared in the same way. h5py is imported only here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.files.io_errors import reason_of
from hpctrain.checkpoint.format.dtypes import MAX_NAME_BYTES, TENSOR_GROUP, is_raw, storage_dtype
from hpctrain.checkpoint.format.metadata import (
    FORMAT_VERSION,
    MAX_METADATA_BYTES,
    SEAL_BYTES,
    StoredExtent,
    StoredPiece,
    StoredTensor,
    encode_tensors,
)
from hpctrain.checkpoint.planning.write_plan import WritePlan
from hpctrain.errors import CheckpointError
from hpctrain.storage import HASH_DIGITS


def gaps_between(taken: Iterable[tuple[int, int]], *, file_bytes: int) -> list[tuple[int, int]]:
    """Returns the gaps between used byte ranges of a file as (begin, end), ascending.

    `taken` contains the used byte ranges, (offset, length), in any order. Raises CheckpointError if two used byte
    ranges overlap, or if one extends beyond the end of the file.
    """
    gaps, position = [], 0
    for offset, num_bytes in [*sorted(taken), (file_bytes, 0)]:
        if offset < position:
            raise CheckpointError(f"two byte ranges in the file overlap at byte {offset}")
        if offset > position:
            gaps.append((position, offset))
        position = offset + num_bytes
    return gaps


METADATA_DATASET = "metadata"
# Large datasets are aligned to pages, or to stripes of the filesystem.
ALIGNMENT_BYTES = 4096
_ALIGN_FROM_BYTES = 1 << 16
# HDF5's object headers are collected in blocks of this size instead of lying between the tensors, so that one write
# covers neighbouring small tensors.
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 12, 1 << 20
_HEADER_BYTES = 400  # approximate size of a dataset's object header


@dataclass(frozen=True, kw_only=True, slots=True)
class SkeletonDataset:
    """An HDF5 dataset of a checkpoint file: its path, the name of its torch dtype, its shape, its length in bytes."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Skeleton:
    """The bytes of a checkpoint file that are not content, and the offsets of its content.

    Attributes:
        offsets: File offset of each dataset's content; 0 for an empty dataset.
        metadata_offset: File offset of the space for the metadata.
        metadata_bytes: Length of that space.
        file_bytes: Length of the file.
        byte_ranges: HDF5's structures, (offset, bytes): everything except content, metadata and commit header.
        structure_hash: Hash of `byte_ranges`.
    """

    offsets: tuple[int, ...]
    metadata_offset: int
    metadata_bytes: int
    file_bytes: int
    byte_ranges: tuple[tuple[int, bytes], ...]
    structure_hash: str


def make_skeleton(
    datasets: Sequence[SkeletonDataset], *, metadata_bytes: int = 0, user_block: bytes = b"",
    alignment: int = ALIGNMENT_BYTES,
) -> Skeleton:  # fmt: skip
    """Creates the skeleton of one checkpoint file: all that HDF5 itself stores, without content. Not collective.

    Contiguous datasets that are allocated early and never filled have a fixed file offset (H5Dget_offset), so that
    their content can be written without HDF5. `metadata_bytes` is the space for the main file's metadata, 0 for part
    files; `user_block` are the first SEAL_BYTES bytes of a part file. Raises CheckpointError if HDF5 cannot represent a
    dataset, if h5py is missing, or if the temporary folder is full.
    """
    h5py = _import_h5py()
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        path = Path(folder) / "skeleton.h5"
        with _hdf5_errors(path):
            _try_out(
                path, num_bytes=metadata_bytes + sum(d.num_bytes for d in datasets), headers=len(datasets)
            )
        with _hdf5_errors(path), h5py.File(path, "w", **_file_options(len(datasets), alignment)) as file:
            group = file.create_group(TENSOR_GROUP)
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_layout(h5py.h5d.CONTIGUOUS)
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            offsets = tuple(_create(h5py, group, dataset, creation) for dataset in datasets)
            metadata_offset = 0
            if metadata_bytes:
                space = h5py.h5s.create_simple((metadata_bytes,))
                kind = h5py.h5t.NATIVE_UINT8
                made = h5py.h5d.create(file.id, METADATA_DATASET.encode(), kind, space, creation)
                metadata_offset = int(made.get_offset())
            file.attrs["hpctrain_format"] = FORMAT_VERSION
        return _take_apart(
            path, datasets, offsets=offsets, metadata=(metadata_offset, metadata_bytes), user_block=user_block
        )


def _try_out(path: Path, *, num_bytes: int, headers: int) -> None:
    """Raises OSError if the filesystem at `path` has no space for a file that HDF5 is about to write.

    HDF5 itself does not survive a full disk.
    """
    with open(path, "wb") as file:
        file.write(bytes(_HEADER_BYTES * headers + _MAX_BLOCK_BYTES))
        file.truncate(max(num_bytes, file.tell()))
    path.unlink()


def _file_options(num_datasets: int, alignment: int) -> dict[str, Any]:
    """Returns the options with which h5py creates the file.

    The object headers of HDF5 1.8 are smaller and faster than the oldest format, and HDF5 1.10 can read everything.
    """
    block = 1 << max(0, num_datasets * _HEADER_BYTES - 1).bit_length()
    return {
        "libver": ("v108", "v110"),
        "locking": False,
        "userblock_size": SEAL_BYTES,
        "alignment_threshold": max(_ALIGN_FROM_BYTES, alignment),
        "alignment_interval": alignment,
        "meta_block_size": min(max(block, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES),
    }


def _create(h5py: Any, group: Any, dataset: SkeletonDataset, creation: Any) -> int:
    link = dataset.path.rpartition("/")[2].encode()
    if len(link) > MAX_NAME_BYTES:
        raise CheckpointError(f"a tensor's name is {len(link)} bytes long, the limit is {MAX_NAME_BYTES}")
    if len(dataset.shape) > 32:
        raise CheckpointError(f"{dataset.path} has {len(dataset.shape)} dimensions, HDF5 has at most 32")
    space = h5py.h5s.create_simple(dataset.shape) if dataset.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.py_create(storage_dtype(dataset.dtype), logical=True)
    made = h5py.h5d.create(group.id, link, kind, space, creation)
    if is_raw(dataset.dtype):
        h5py.Dataset(made).attrs["torch_dtype"] = dataset.dtype
    return int(made.get_offset()) if dataset.num_bytes else 0


def _take_apart(
    path: Path, datasets: Sequence[SkeletonDataset], *, offsets: tuple[int, ...], metadata: tuple[int, int],
    user_block: bytes,
) -> Skeleton:  # fmt: skip
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        file_bytes = os.fstat(fd).st_size
        taken = [(o, d.num_bytes) for o, d in zip(offsets, datasets, strict=True) if d.num_bytes]
        if user_block:
            os.pwrite(fd, user_block, 0)
        else:
            taken += [(0, SEAL_BYTES), metadata]
        byte_ranges = tuple(
            (begin, os.pread(fd, end - begin, begin))
            for begin, end in gaps_between(taken, file_bytes=file_bytes)
        )
    finally:
        os.close(fd)
    return Skeleton(
        offsets=offsets,
        metadata_offset=metadata[0],
        metadata_bytes=metadata[1],
        file_bytes=file_bytes,
        byte_ranges=byte_ranges,
        structure_hash=structure_hash(byte_ranges),
    )


def structure_hash(byte_ranges: Iterable[tuple[int, bytes]]) -> str:
    """Returns the hash of a file's HDF5 structures, given as ascending byte ranges (offset, bytes)."""
    digest = xxhash.xxh3_64()
    for _, data in byte_ranges:
        digest.update(data)
    return digest.hexdigest()


@contextmanager
def _hdf5_errors(path: Path) -> Iterator[None]:
    """Context in which the various exceptions of HDF5 become a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"cannot create the HDF5 structures of a checkpoint in {path.parent}: {reason}"
        ) from error


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise CheckpointError(f"saving a checkpoint needs h5py: {error}") from error
    return h5py


# The metadata's JSON for one layout, with placeholders for offsets and hashes. Pure.
#
# For ten thousand tensors, creating the text takes longer than writing their bytes, and from one save to
# the next only the hashes change: 16 digits each, always at the same positions.


_OFFSET_DIGITS = 16
_PADDING_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorsText:
    """The list of tensors in a checkpoint's metadata, as JSON text with placeholders for numbers filled in later.

    A piece is an HDF5 dataset with a part of a tensor. An extent is a region of a piece that has one hash.

    Attributes:
        text: The JSON text.
        hash_places: Position in the text of each extent's hash: shape (num_extents,).
        offset_places: Position in the text of each piece's file offset: shape (num_pieces,).
        written_as: For each extent, in the order of the text, its index in the list of all ranks' extents: shape
            (num_extents,). That list contains the extents rank by rank, in the plan's order.
    """

    text: bytes
    hash_places: NDArray[np.int64]
    offset_places: NDArray[np.int64]
    written_as: NDArray[np.int64]

    def with_offsets(self, offsets: Sequence[int]) -> TensorsText:
        """Returns a copy in which the file offsets are filled in.

        `offsets` has one entry per piece (HDF5 dataset), in the order of the text.
        """
        digits = b"".join(str(offset).ljust(_OFFSET_DIGITS).encode() for offset in offsets)
        filled = np.frombuffer(self.text, dtype=np.uint8).copy()
        _fill(filled, places=self.offset_places, digits=digits, width=_OFFSET_DIGITS)
        return TensorsText(
            text=filled.tobytes(), hash_places=self.hash_places, offset_places=self.offset_places,
            written_as=self.written_as,
        )  # fmt: skip


def tensors_text(plan: WritePlan) -> TensorsText:
    """Returns the list of tensors for a checkpoint's metadata, as JSON text.

    The text has placeholders for the file offsets and the hashes, which the write plan `plan` does not contain.
    """
    no_hash = secrets.token_hex(HASH_DIGITS // 2)
    no_offset = 10 ** (_OFFSET_DIGITS - 1) + secrets.randbelow(10 ** (_OFFSET_DIGITS - 1))
    found: dict[tuple[int, int], list[tuple[tuple[int, ...], int, StoredExtent]]] = defaultdict(list)
    number = 0
    for rank in range(plan.num_ranks):
        for extent in plan.extents_of(rank):
            stored = StoredExtent(box=extent.box, hash=no_hash)
            found[extent.tensor, extent.piece].append((extent.box.offset, number, stored))
            number += 1
    written_as: list[int] = []
    tensors = {}
    for i, (tensor, planned) in enumerate(zip(plan.tensors, plan.pieces(), strict=True)):
        pieces = []
        for j, piece in enumerate(planned):
            listed = sorted(found[i, j], key=lambda entry: entry[:2])
            written_as += [number for _, number, _ in listed]
            pieces.append(
                StoredPiece(
                    file=piece.file, dataset=piece.dataset, file_offset=no_offset, box=piece.box,
                    extents=tuple(extent for _, _, extent in listed),
                )
            )  # fmt: skip
        tensors[tensor.name] = StoredTensor(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, view=tensor.view, pieces=tuple(pieces)
        )
    text = json.dumps(encode_tensors(tensors), separators=(",", ":")).encode()
    return TensorsText(
        text=text,
        hash_places=_places(text, no_hash),
        offset_places=_places(text, str(no_offset)),
        written_as=np.array(written_as, dtype=np.int64),
    )


def room_for(header: Mapping[str, Any], tensors: TensorsText, *, num_parts: int) -> int:
    """Returns the number of bytes to reserve in the main file for the metadata: its length, and room to grow.

    The metadata consists of `header`, whose JSON document may be longer in a later save, and the list of tensors
    `tensors`. `num_parts` is the number of files of the checkpoint. Raises CheckpointError if the metadata exceeds
    MAX_METADATA_BYTES.
    """
    needed = len(json.dumps(header)) + len(tensors.text) + 80 * num_parts + _PADDING_BYTES // 2
    if needed > MAX_METADATA_BYTES:
        raise CheckpointError(
            f"the metadata takes {needed} bytes, {len(tensors.text)} of them for the list of tensors; the limit is "
            f"{MAX_METADATA_BYTES}"
        )
    return -(-needed // _PADDING_BYTES) * _PADDING_BYTES


def metadata_text(
    header: Mapping[str, Any], tensors: TensorsText, *, hashes: NDArray[np.uint64], padded_bytes: int
) -> memoryview:
    """Returns the complete metadata of a checkpoint as JSON text, padded with spaces to `padded_bytes` bytes.

    `header` is the metadata without the list of tensors, which is in `tensors`. `hashes` contains the hashes of all
    ranks' extents (regions with one hash), rank by rank: uint64, shape (num_extents,). Raises CheckpointError if the
    metadata exceeds `padded_bytes` or MAX_METADATA_BYTES.
    """
    head = json.dumps(header, separators=(",", ":")).encode()[:-1] + b',"tensors":'
    num_bytes = len(head) + len(tensors.text) + 1
    if num_bytes > min(padded_bytes, MAX_METADATA_BYTES):
        limit = min(padded_bytes, MAX_METADATA_BYTES)
        raise CheckpointError(f"the metadata is {num_bytes} bytes long, the limit is {limit}")
    # Assembled in the result: another copy would take as long as hashing a thousand tensors.
    result = np.empty(padded_bytes, dtype=np.uint8)
    result[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    result[len(head) : num_bytes - 1] = np.frombuffer(tensors.text, dtype=np.uint8)
    result[num_bytes - 1] = ord("}")
    result[num_bytes:] = ord(" ")
    digits = hashes[tensors.written_as].astype(">u8").tobytes().hex().encode()
    _fill(result, places=tensors.hash_places + len(head), digits=digits, width=HASH_DIGITS)
    return result.data


def _places(text: bytes, token: str) -> NDArray[np.int64]:
    return np.array([match.start() for match in re.finditer(token.encode(), text)], dtype=np.int64)


def _fill(text: NDArray[np.uint8], *, places: NDArray[np.int64], digits: bytes, width: int) -> None:
    """Overwrites parts of `text`: at each of the positions `places` with the next `width` bytes of `digits`."""
    if len(places):
        windows = np.lib.stride_tricks.sliding_window_view(text, width, writeable=True)
        windows[places] = np.frombuffer(digits, dtype=np.uint8).reshape(-1, width)
