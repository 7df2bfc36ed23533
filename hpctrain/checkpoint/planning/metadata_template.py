"""The metadata's JSON for one layout, with placeholders for offsets and hashes. Pure.

For ten thousand tensors, creating the text takes longer than writing their bytes, and from one save to the next only
the hashes change: 16 digits each, always at the same positions.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.metadata import (
    MAX_METADATA_BYTES,
    StoredExtent,
    StoredPiece,
    StoredTensor,
    encode_tensors,
)
from hpctrain.checkpoint.planning.write_plan import WritePlan
from hpctrain.errors import CheckpointError
from hpctrain.storage import HASH_DIGITS

_OFFSET_DIGITS = 16
_PADDING_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorsText:
    """The JSON list of tensors.

    hash_places, offset_places: positions in `text` of each extent's hash and of each piece's offset. written_as[i]:
    number of the i-th extent in `text` when all ranks' extents are counted rank by rank, in the plan's order.
    """

    text: bytes
    hash_places: NDArray[np.int64]
    offset_places: NDArray[np.int64]
    written_as: NDArray[np.int64]

    def with_offsets(self, offsets: Sequence[int]) -> TensorsText:
        """Returns the text with all offsets filled in. offsets: of all pieces, in the order of tensors and pieces."""
        digits = b"".join(str(offset).ljust(_OFFSET_DIGITS).encode() for offset in offsets)
        filled = np.frombuffer(self.text, dtype=np.uint8).copy()
        _fill(filled, places=self.offset_places, digits=digits, width=_OFFSET_DIGITS)
        return TensorsText(
            text=filled.tobytes(), hash_places=self.hash_places, offset_places=self.offset_places,
            written_as=self.written_as,
        )  # fmt: skip


def tensors_text(plan: WritePlan) -> TensorsText:
    """Returns the text for a plan, with placeholders for offsets and hashes."""
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
    """Returns the number of bytes to reserve for the metadata: its length, plus some for a document that grows.

    Raises CheckpointError if the metadata exceeds MAX_METADATA_BYTES.
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
    """Returns the complete metadata, padded with spaces to `padded_bytes` bytes.

    hashes: uint64, shape (num_extents,), of all ranks' extents, rank by rank. Raises CheckpointError if the metadata
    exceeds `padded_bytes` or MAX_METADATA_BYTES.
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
    """Writes `width` digits at each of the positions."""
    if len(places):
        windows = np.lib.stride_tricks.sliding_window_view(text, width, writeable=True)
        windows[places] = np.frombuffer(digits, dtype=np.uint8).reshape(-1, width)
