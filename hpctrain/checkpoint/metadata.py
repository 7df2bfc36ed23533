"""What a checkpoint says about itself: JSON in the file's dataset `/metadata`. Encoding, and checking.

Whatever comes out of `decode_metadata` is safe to act on: every tensor lies inside the file, the tensors
together are no larger than it, and every element of a tensor belongs to exactly one hashed extent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.checkpoint.boxes import Box, Steps, TooFragmentedError, cover_exactly
from hpctrain.checkpoint.dtypes import dtype_named
from hpctrain.checkpoint.hashing import HASH_DIGITS, HASH_NAME
from hpctrain.checkpoint.names import escape
from hpctrain.checkpoint.seal import SEAL_BYTES
from hpctrain.errors import CheckpointError

TENSOR_GROUP = "tensors"
MAX_METADATA_BYTES = 256 << 20  # about 6 million extents, 24 TB of state
_MAX_DIMS = 32  # HDF5's limit
_MAX_INT = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExtent:
    box: Box  # of the tensor's view
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in the file. file_offset: of its first byte, 0 when it has none. view: see `PlannedTensor`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    file_offset: int
    extents: tuple[StoredExtent, ...]

    @property
    def elem_bytes(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.elem_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """step, document: as given to `save`. writer: who wrote it and how. created_unix_s: when."""

    step: int
    created_unix_s: float
    writer: Mapping[str, Any]
    document: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def encode_metadata(metadata: Metadata, *, byte_order: str) -> bytes:
    value = {
        "step": metadata.step,
        "created_unix_s": metadata.created_unix_s,
        "writer": dict(metadata.writer),
        "hash": HASH_NAME,
        "byte_order": byte_order,
        "document": dict(metadata.document),
        "tensors": [
            {
                "name": tensor.name,
                "dataset": f"/{TENSOR_GROUP}/{escape(tensor.name)}",
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "view": list(tensor.view),
                "offset": tensor.file_offset,
                "extents": [[list(e.box.offset), list(e.box.shape), e.hash] for e in tensor.extents],
            }
            for tensor in metadata.tensors.values()
        ],
    }
    data = json.dumps(value, separators=(",", ":")).encode()
    if len(data) > MAX_METADATA_BYTES:
        raise CheckpointError(f"the metadata is {len(data)} bytes long, the limit is {MAX_METADATA_BYTES}")
    return data


def decode_metadata(data: bytes, *, file_bytes: int, byte_order: str) -> Metadata:
    """Metadata of a file that is `file_bytes` long.

    Raises CheckpointError for anything that is not as `encode_metadata` writes it, whoever made it.
    """
    try:
        value = _object(json.loads(data), "metadata")
        if value["hash"] != HASH_NAME:
            raise CheckpointError(f"the hashes are {value['hash']!r}, we know {HASH_NAME}")
        if value["byte_order"] != byte_order:
            raise CheckpointError(
                f"written on a {value['byte_order']}-endian machine, this one is {byte_order}-endian"
            )
        budget = _Budget(bytes_left=file_bytes)
        tensors = [_tensor(entry, file_bytes=file_bytes, budget=budget) for entry in _list(value["tensors"])]
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) != len(tensors):
            raise CheckpointError("the metadata lists a tensor's name twice")
        created = value["created_unix_s"]
        if isinstance(created, bool) or not isinstance(created, (int, float)):
            raise CheckpointError(f"the time of writing is {created!r}")
        return Metadata(
            step=_natural(value["step"]),
            created_unix_s=float(created),
            writer=_object(value["writer"], "writer"),
            document=_object(value["document"], "document"),
            tensors=by_name,
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the metadata cannot be understood: {reason[:200]}") from error


@dataclass(kw_only=True)
class _Budget:
    """All tensors together may not claim more than the file has: bounded memory for whoever loads them.
    And the checks together take a bounded time."""

    bytes_left: int
    steps: Steps = field(default_factory=Steps)


def _tensor(entry: Any, *, file_bytes: int, budget: _Budget) -> StoredTensor:
    entry = _object(entry, "tensor")
    name = entry["name"]
    if not isinstance(name, str):
        raise CheckpointError(f"a tensor's name is {name!r:.100}")
    shape, view = _shape(entry["shape"]), _shape(entry["view"])
    elem_bytes = dtype_named(str(entry["dtype"])).itemsize
    num_elems = math.prod(shape)
    if math.prod(view) != num_elems or (view != shape and len(view) != 1):
        raise CheckpointError(f"tensor {name!r}: view {list(view)} does not fit shape {list(shape)}")
    offset, num_bytes = _natural(entry["offset"]), num_elems * elem_bytes
    if num_bytes and (offset < SEAL_BYTES or offset + num_bytes > file_bytes):
        raise CheckpointError(
            f"tensor {name!r} is placed at byte {offset}, {num_bytes} bytes long, in a file of {file_bytes}"
        )
    budget.bytes_left -= num_bytes
    if budget.bytes_left < 0:
        raise CheckpointError(f"the tensors together are larger than the file's {file_bytes} bytes")
    extents = tuple(_extent(item, name=name, view=view) for item in _list(entry["extents"]))
    try:
        covered = cover_exactly([extent.box for extent in extents], shape=view, steps=budget.steps)
    except TooFragmentedError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from error
    if not covered:
        raise CheckpointError(f"the extents of tensor {name!r} do not hold every element exactly once")
    return StoredTensor(
        name=name, dtype=str(entry["dtype"]), shape=shape, view=view, file_offset=offset, extents=extents
    )


def _extent(item: Any, *, name: str, view: tuple[int, ...]) -> StoredExtent:
    offset, shape, digest = _list(item)
    box = Box(offset=_shape(offset), shape=_shape(shape))
    if not box.lies_within(view) or box.num_elems == 0:
        raise CheckpointError(f"tensor {name!r}: extent {box} is not inside {list(view)}")
    if not isinstance(digest, str) or len(digest) != HASH_DIGITS:
        raise CheckpointError(f"tensor {name!r}: extent {box} has no hash")
    return StoredExtent(box=box, hash=digest)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise CheckpointError("a list is missing in the metadata")
    return value


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_INT:
        raise CheckpointError(f"{value!r:.100} is not a whole number from 0 to 2^63 - 1")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(map(_natural, _list(value)))
    if len(shape) > _MAX_DIMS or math.prod(n for n in shape if n) >= _MAX_INT:
        raise CheckpointError(f"shape {list(shape)!r:.100} is beyond any tensor")
    return shape
