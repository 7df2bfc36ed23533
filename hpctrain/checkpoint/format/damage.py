"""Content that is not what was written, and where."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.checkpoint.format.boxes import Box
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedExtent:
    """An extent whose bytes are not the ones written. first_byte, last_byte: of `file`, both included; with
    an extent of a sharded tensor, other extents may lie between."""

    tensor: str
    box: Box
    file: str
    first_byte: int
    last_byte: int
    reason: str

    def __str__(self) -> str:
        place = f"bytes {self.first_byte} to {self.last_byte} of {self.file}"
        return f"tensor {self.tensor!r}, {place}: {self.reason}"


class DamagedContentError(CheckpointError):
    """Content that does not fit its hash. `damage` says where."""

    def __init__(self, damage: DamagedExtent) -> None:
        super().__init__(f"damaged: {damage}")
        self.damage = damage
