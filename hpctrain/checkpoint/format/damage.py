"""Errors that locate damaged tensor content."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.checkpoint.format.boxes import Box
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedExtent:
    """An extent whose bytes are not those that were written.

    first_byte, last_byte: byte positions in `file`, both inclusive. Bytes of other extents of a sharded tensor may
    lie between them.
    """

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
    """The content does not match its hash, or cannot be read. `damage` locates it."""

    def __init__(self, damage: DamagedExtent) -> None:
        super().__init__(f"damaged: {damage}")
        self.damage = damage
