"""The metadata that a checkpoint file contains, and the commit header, which proves that the file is complete."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpctrain.checkpoint.format.boxes import Box, Steps, TooFragmentedError, cover_exactly
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.errors import CheckpointError
from hpctrain.storage import HASH_DIGITS, HASH_NAME, hash_of

# The commit header ("seal"): the first 4096 bytes of a checkpoint file, in HDF5's user block.
#
# It holds the offset, length and hash of the metadata, and its own hash. A save writes it last; until then
# it is zeros, so a file without a valid commit header is an unfinished save. With it, loading needs no HDF5
# library, and so the library never interprets the bytes of a damaged or malicious file.


SEAL_BYTES = 4096
FORMAT_VERSION = 2  # written by this version
READ_VERSIONS = (1, 2)
_MAGIC = b"hpctrain checkpoint\n"
_PART_MAGIC = b"hpctrain checkpoint part\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """Content of the commit header of a main file.

    The hashes in the header, together with the hashes of the tensors' content in the metadata, cover every byte of the
    file.

    Attributes:
        metadata_offset: File offset of the metadata, in bytes.
        metadata_bytes: Length of the metadata, in bytes.
        metadata_hash: Hash of the metadata's bytes.
        structure_hash: Hash of all bytes that are neither commit header, metadata nor tensor content: HDF5's own
            structures.
        file_bytes: Length of the whole file.
    """

    metadata_offset: int
    metadata_bytes: int
    metadata_hash: str
    structure_hash: str
    file_bytes: int


class UnknownFormatError(CheckpointError):
    """Raised if a commit header is valid, but this hpctrain does not know the checkpoint's format version."""


def encode_seal(seal: Seal) -> bytes:
    """Returns the commit header as a block of SEAL_BYTES bytes.

    The block consists of a magic line, a line of JSON, the hash of both lines, and zeros.
    """
    values = {
        "format": FORMAT_VERSION,
        "metadata_offset": seal.metadata_offset,
        "metadata_bytes": seal.metadata_bytes,
        "metadata_xxh3_64": seal.metadata_hash,
        "structure_xxh3_64": seal.structure_hash,
        "file_bytes": seal.file_bytes,
    }
    return _block(_MAGIC, values)


def _block(magic: bytes, values: dict[str, Any]) -> bytes:
    text = magic + json.dumps(values).encode() + b"\n"
    block = text + hash_of(text).encode() + b"\n"
    return block.ljust(SEAL_BYTES, b"\0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSeal:
    """Header of a part file, which is any file but the main one.

    `id` and `step` identify the checkpoint; `number` is the index of the file among the checkpoint's `num_files` files.
    This header does not prove that the file is complete: the hashes of a part file are in the main file.
    """

    id: str
    step: int
    number: int
    num_files: int


def encode_part_seal(seal: PartSeal) -> bytes:
    """Returns the header of a part file (any file but the main one) as a block of SEAL_BYTES bytes."""
    return _block(
        _PART_MAGIC,
        {
            "format": FORMAT_VERSION,
            "id": seal.id,
            "step": seal.step,
            "number": seal.number,
            "files": seal.num_files,
        },
    )


def empty_part_block() -> bytes:
    return bytes(SEAL_BYTES)


def decode_seal(block: bytes, *, file_bytes: int) -> Seal:
    """Returns the decoded commit header of a file whose length is now `file_bytes`.

    Raises CheckpointError if the header is missing, is damaged, or records another file length. Raises
    UnknownFormatError if the header is valid but has an unknown format version.
    """
    if len(block) == SEAL_BYTES and not any(block):
        raise CheckpointError("the save of this file was never finished: its commit header (seal) is empty")
    lines = block.split(b"\n", 3)
    if len(block) != SEAL_BYTES or len(lines) != 4 or lines[0] + b"\n" != _MAGIC:
        raise CheckpointError("not an hpctrain checkpoint: it does not begin with a commit header (seal)")
    text = lines[0] + b"\n" + lines[1] + b"\n"
    if lines[2] != hash_of(text).encode() or any(lines[3]):
        raise CheckpointError("the commit header (seal) of the file is damaged: its hash does not match")
    try:
        values = json.loads(lines[1])
        version = values["format"]
        if version not in READ_VERSIONS:
            raise UnknownFormatError(
                f"the checkpoint has format {version!r}, this hpctrain reads formats 1 to {FORMAT_VERSION}: "
                "use the version that wrote it, or a newer one"
            )
        seal = Seal(
            metadata_offset=_offset(values["metadata_offset"]),
            metadata_bytes=_offset(values["metadata_bytes"]),
            metadata_hash=str(values["metadata_xxh3_64"]),
            structure_hash=str(values["structure_xxh3_64"]),
            file_bytes=_offset(values["file_bytes"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the commit header (seal) has invalid content: {error}") from error
    if seal.file_bytes != file_bytes:
        raise CheckpointError(f"the file is {file_bytes} bytes long, it was written with {seal.file_bytes}")
    if seal.metadata_offset < SEAL_BYTES or seal.metadata_offset + seal.metadata_bytes > file_bytes:
        raise CheckpointError(
            f"the commit header (seal) places the metadata at byte {seal.metadata_offset}, "
            f"{seal.metadata_bytes} bytes long, "
            f"which is outside the file of {file_bytes} bytes"
        )
    return seal


def _offset(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not an integer from 0 to 2^63 - 1")
    return value


# Pauses Python's garbage collector while many objects are created, since it would traverse all of them
# repeatedly.


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disables cyclic garbage collection in all threads during the block, which should be short.

    Reference counting continues.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Metadata of a checkpoint: JSON in the dataset `/metadata` of its main file. Encoding, decoding and
# validation.
#
# The result of `decode_metadata` is safe to use: every piece lies inside its file, the pieces of a file
# together are no larger than the file, and every element of a tensor belongs to exactly one piece and one
# hashed extent.


TENSOR_GROUP = "tensors"
MAX_METADATA_BYTES = 64 << 20  # about 1.4 million extents, 6 TB of state; takes about 2 s to read
_MAX_DIMS = 32  # HDF5's limit
_MAX_INT = 2**63
_MAX_FILES = 100_000  # the name of a part file has five digits
PART_NAME = re.compile(r"data-(?!00000\.)\d{5}\.h5")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExtent:
    box: Box  # in the coordinates of the tensor's view; lies inside its piece
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """One HDF5 dataset of a tensor: the elements of the rectangular region `box`, dense and in row-major order.

    Attributes:
        file: Index of the file that holds the dataset; 0 is the main file.
        dataset: HDF5 path of the dataset in that file.
        file_offset: Position of the dataset's first byte in that file; 0 if the piece is empty.
        box: The elements, as a box (offset and shape) of an array of shape `StoredTensor.view`.
        extents: The parts of the piece, each of which has a hash.
    """

    file: int
    dataset: str
    file_offset: int
    box: Box
    extents: tuple[StoredExtent, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its dtype and shape, and where its elements are.

    Attributes:
        name: Name of the tensor.
        dtype: Name of the torch dtype, such as "float32".
        shape: Shape of the tensor.
        view: Shape of the array in which the boxes of pieces and extents are given. If the tensor was sharded, this is
            the tensor's own shape. If the tensor was replicated, it is (num_elems,), the shape of the flattened tensor.
        pieces: The HDF5 datasets that contain the tensor. Together they hold every element exactly once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def elem_bytes(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.elem_bytes

    @property
    def extents(self) -> list[tuple[StoredPiece, StoredExtent]]:
        """All extents of the tensor (regions with one hash each), each after the HDF5 dataset that contains it."""
        return [(piece, extent) for piece in self.pieces for extent in piece.extents]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """A part file (any file but the main one).

    `structure_hash` is the hash of all bytes of the file that are not tensor content.
    """

    name: str
    num_bytes: int
    structure_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """What a checkpoint records about itself: the saved state, and where and when it was written.

    Attributes:
        step: Step of the checkpoint, as passed to `save`.
        created_unix_s: Time of the save, in seconds since 1970.
        writer: Version of hpctrain, number of ranks, engine and number of files.
        document: The document, as passed to `save`.
        tensors: The tensors by name.
        id: Identifier of the save, 16 hex digits; "" in format 1.
        parent: Step and id of the checkpoint from which the run resumed, or None.
        parts: The part files, which have the indices 1, 2, ...; file 0 is the main file, which holds this metadata.
    """

    step: int
    created_unix_s: float
    writer: Mapping[str, Any]
    document: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    id: str = ""
    parent: Mapping[str, Any] | None = None
    parts: tuple[StoredPart, ...] = ()


def encode_header(metadata: Metadata, *, byte_order: str) -> dict[str, Any]:
    """Returns the metadata as a JSON object without its entry "tensors"."""
    return {
        "step": metadata.step,
        "id": metadata.id,
        "parent": None if metadata.parent is None else dict(metadata.parent),
        "created_unix_s": metadata.created_unix_s,
        "writer": dict(metadata.writer),
        "hash": HASH_NAME,
        "byte_order": byte_order,
        "parts": [[part.name, part.num_bytes, part.structure_hash] for part in metadata.parts],
        "document": dict(metadata.document),
    }


def encode_tensors(tensors: Mapping[str, StoredTensor]) -> list[Any]:
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "view": list(tensor.view),
            "pieces": [
                {
                    "file": piece.file,
                    "dataset": piece.dataset,
                    "offset": piece.file_offset,
                    "start": list(piece.box.offset),
                    "shape": list(piece.box.shape),
                    "extents": [[list(e.box.offset), list(e.box.shape), e.hash] for e in piece.extents],
                }
                for piece in tensor.pieces
            ],
        }
        for tensor in tensors.values()
    ]


def decode_metadata(data: bytes, *, file_bytes: int, byte_order: str) -> Metadata:
    """Decodes and checks the metadata `data` of a checkpoint, whose main file has `file_bytes` bytes.

    Raises CheckpointError for any bytes that a save cannot have written, maliciously made ones included.
    """
    try:
        value = _object(_parsed(data), "metadata")
        if value["hash"] != HASH_NAME:
            raise CheckpointError(
                f"the hashes are {value['hash']!r}; the only supported ones are {HASH_NAME}"
            )
        if value["byte_order"] != byte_order:
            raise CheckpointError(
                f"written on a {value['byte_order']}-endian machine, this one is {byte_order}-endian"
            )
        listed = _list(value.get("parts", []))
        if len(listed) >= _MAX_FILES:
            raise CheckpointError(
                f"the metadata lists {len(listed)} part files, there must be fewer than {_MAX_FILES}"
            )
        parts = tuple(map(_part, listed))
        if len({part.name for part in parts}) != len(parts):
            raise CheckpointError("the metadata lists a part file twice")
        file_sizes = [file_bytes, *(part.num_bytes for part in parts)]
        budget = _Budget(file_bytes=file_sizes, bytes_left=list(file_sizes))
        tensors = [_tensor(entry, budget=budget) for entry in _list(value["tensors"])]
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) != len(tensors):
            raise CheckpointError("the metadata lists a tensor's name twice")
        created = value["created_unix_s"]
        if isinstance(created, bool) or not isinstance(created, (int, float)):
            raise CheckpointError(f"created_unix_s of the metadata is not a number: {created!r}")
        return Metadata(
            step=_natural(value["step"]),
            created_unix_s=float(created),
            writer=_object(value["writer"], "writer"),
            document=_object(value["document"], "document"),
            tensors=by_name,
            id=_id(value.get("id", "")),
            parent=_object(value["parent"], "parent") if value.get("parent") is not None else None,
            parts=parts,
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the metadata has invalid content: {reason[:200]}") from error


def _parsed(data: bytes) -> Any:
    """Returns the parsed JSON. The garbage collector is paused meanwhile.

    It would traverse millions of small lists repeatedly. While it is paused, parsing is 8 times as fast, and the
    time that a malicious file can take stays bounded.
    """
    with collector_paused():
        return json.loads(data)


@dataclass(kw_only=True)
class _Budget:
    """Limits for decoding one checkpoint, which bound the memory and the time that a malicious file can take.

    The tensors in a file together must not be larger than the file, which limits the memory. `steps` limits the number
    of steps of the checks, and so their time.
    """

    file_bytes: Sequence[int]
    bytes_left: list[int]
    steps: Steps = field(default_factory=Steps)


def _tensor(entry: Any, *, budget: _Budget) -> StoredTensor:
    entry = _object(entry, "tensor")
    name = entry["name"]
    if not isinstance(name, str):
        raise CheckpointError(f"a tensor's name in the metadata is not text: {name!r:.100}")
    shape, view = _shape(entry["shape"]), _shape(entry["view"])
    elem_bytes = dtype_named(str(entry["dtype"])).itemsize
    num_elems = math.prod(shape)
    if math.prod(view) != num_elems or (view != shape and len(view) != 1):
        raise CheckpointError(f"tensor {name!r}: view {list(view)} does not fit shape {list(shape)}")
    if "pieces" in entry:
        found = _list(entry["pieces"])
    else:  # format 1: one piece, the whole tensor
        found = [{**entry, "file": 0, "start": [0] * len(view), "shape": list(view)}]
    pieces = tuple(_piece(item, name=name, view=view, elem_bytes=elem_bytes, budget=budget) for item in found)
    if num_elems:
        if any(piece.box.num_elems == 0 for piece in pieces):
            raise CheckpointError(f"tensor {name!r} has an empty dataset")
        covered = _covers([piece.box for piece in pieces], shape=view, name=name, budget=budget)
        if not covered:
            raise CheckpointError(f"the datasets of tensor {name!r} do not hold every element exactly once")
    return StoredTensor(name=name, dtype=str(entry["dtype"]), shape=shape, view=view, pieces=pieces)


def _piece(item: Any, *, name: str, view: tuple[int, ...], elem_bytes: int, budget: _Budget) -> StoredPiece:
    item = _object(item, "piece")
    number, offset, dataset = _natural(item["file"]), _natural(item["offset"]), item["dataset"]
    box = Box(offset=_shape(item["start"]), shape=_shape(item["shape"]))
    if not isinstance(dataset, str):
        raise CheckpointError(f"tensor {name!r}: the name of a dataset is not a string: {dataset!r:.100}")
    if not box.lies_within(view):
        raise CheckpointError(f"tensor {name!r}: the box of a dataset, {box}, is not inside {list(view)}")
    if number >= len(budget.file_bytes):
        raise CheckpointError(
            f"tensor {name!r} refers to file {number}; the number of files is {len(budget.file_bytes)}"
        )
    num_bytes, file_bytes = box.num_elems * elem_bytes, budget.file_bytes[number]
    if num_bytes and (offset < SEAL_BYTES or offset + num_bytes > file_bytes):
        raise CheckpointError(
            f"tensor {name!r} at byte {offset}, {num_bytes} bytes long, lies outside its file of {file_bytes} bytes"
        )
    budget.bytes_left[number] -= num_bytes
    if budget.bytes_left[number] < 0:
        raise CheckpointError(f"the tensors together are larger than the file's {file_bytes} bytes")
    extents = tuple(_extent(entry, name=name, piece=box) for entry in _list(item["extents"]))
    inside = [
        Box(offset=tuple(o - b for o, b in zip(e.box.offset, box.offset, strict=True)), shape=e.box.shape)
        for e in extents
    ]
    if not _covers(inside, shape=box.shape, name=name, budget=budget):
        raise CheckpointError(f"the hashed parts of tensor {name!r} do not hold every element exactly once")
    return StoredPiece(file=number, dataset=dataset, file_offset=offset, box=box, extents=extents)


def _covers(boxes: list[Box], *, shape: tuple[int, ...], name: str, budget: _Budget) -> bool:
    try:
        return cover_exactly(boxes, shape=shape, steps=budget.steps)
    except TooFragmentedError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from error


def _extent(item: Any, *, name: str, piece: Box) -> StoredExtent:
    offset, shape, digest = _list(item)
    box = Box(offset=_shape(offset), shape=_shape(shape))
    inside = len(box.offset) == len(box.shape) == len(piece.shape) and all(
        p <= o and o + n <= p + m
        for o, n, p, m in zip(box.offset, box.shape, piece.offset, piece.shape, strict=True)
    )
    if not inside or box.num_elems == 0:
        raise CheckpointError(f"tensor {name!r}: the hashed part {box} is not inside its dataset, {piece}")
    if not isinstance(digest, str) or len(digest) != HASH_DIGITS:
        raise CheckpointError(f"tensor {name!r}: the part {box} has no hash")
    return StoredExtent(box=box, hash=digest)


def _part(item: Any) -> StoredPart:
    name, num_bytes, digest = _list(item)
    # Only names that a save gives to part files: the name is joined to the checkpoint's path.
    if not isinstance(name, str) or PART_NAME.fullmatch(name) is None:
        raise CheckpointError(f"invalid name of a part file: {name!r:.100}")
    if not isinstance(digest, str) or len(digest) != HASH_DIGITS:
        raise CheckpointError(f"part file {name} has no hash")
    return StoredPart(name=name, num_bytes=_natural(num_bytes), structure_hash=digest)


def _id(value: Any) -> str:
    if not isinstance(value, str) or re.fullmatch(r"([0-9a-f]{16})?", value) is None:
        raise CheckpointError(f"the checkpoint's id is not 16 hex digits: {value!r:.100}")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise CheckpointError("the metadata has a value that is not a list where a list is required")
    return value


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_INT:
        raise CheckpointError(
            f"the metadata has {value!r:.100} where an integer from 0 to 2^63 - 1 is required"
        )
    return value


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(map(_natural, _list(value)))
    if len(shape) > _MAX_DIMS or math.prod(n for n in shape if n) >= _MAX_INT:
        raise CheckpointError(f"shape {list(shape)!r:.100} is too large for a tensor")
    return shape
