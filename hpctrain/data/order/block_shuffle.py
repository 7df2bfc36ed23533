"""Shuffles by blocks within a window: large reads, and nearly the mixing of a full shuffle.

The dataset is cut into blocks of consecutive samples. The blocks are shuffled and divided into windows of
`window_blocks` blocks; the samples of each window are shuffled among each other. So an epoch reads the blocks of one
window at a time, each of them completely, and each only once.
The order is computed, never stored. docs/guides/data-order.md measures how well it mixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import Span, check_order, positions
from hpctrain.data.order.permutation import MAX_GROUP_VALUES, Direction, epoch_key, permute, permute_groups
from hpctrain.errors import RecipeError

_BLOCKS, _SAMPLES = 1, 2  # purposes of keys


@dataclass(frozen=True, kw_only=True)
class BlockOrder:
    """Order of one epoch in blocks of `block_samples` samples (the last may be smaller).

    Samples are mixed within windows of `window_blocks` blocks. Raises RecipeError if either is below 1.
    """

    num_samples: int
    block_samples: int
    window_blocks: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_order(
            num_samples=self.num_samples, seed=self.seed, epoch=self.epoch, max_samples=MAX_GROUP_VALUES
        )
        if self.block_samples < 1 or self.window_blocks < 1:
            raise RecipeError(
                f"an order in blocks of {self.block_samples} samples, mixed within {self.window_blocks} blocks: "
                "both must be at least 1"
            )

    @property
    def num_blocks(self) -> int:
        return -(-self.num_samples // self.block_samples)

    @property
    def num_windows(self) -> int:
        return -(-self.num_blocks // self.window_blocks)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """See `Order.at`."""
        where = positions(start, stop, num_samples=self.num_samples)
        if start == stop:
            return where
        slots, _ = self._slots_at(where)
        windows = slots // self.window_blocks
        first, end = self._first_position(windows), self._first_position(windows + 1)
        mixed = first + permute_groups(
            where - first,
            groups=windows,
            num_values=end - first,
            key=epoch_key(self.seed, self.epoch, purpose=_SAMPLES),
        )
        slots, offsets = self._slots_at(mixed)
        return self._blocks_in(slots) * self.block_samples + offsets

    def windows_of(self, start: int, stop: int) -> range:
        """Returns the numbers of the windows that contain positions start, ..., stop - 1."""
        if start >= stop:
            return range(0)
        slots, _ = self._slots_at(positions(start, stop, num_samples=self.num_samples)[[0, -1]])
        return range(int(slots[0]) // self.window_blocks, int(slots[1]) // self.window_blocks + 1)

    def blocks_of(self, window: int) -> list[Span]:
        """Returns the blocks of a window as spans of samples of the dataset, in ascending order."""
        first = window * self.window_blocks
        slots = np.arange(first, min(first + self.window_blocks, self.num_blocks), dtype=np.int64)
        starts = np.sort(self._blocks_in(slots)) * self.block_samples
        return [Span(int(at), min(int(at) + self.block_samples, self.num_samples)) for at in starts]

    # A slot is the index of a block in the epoch. All blocks have `block_samples` samples, except the dataset's last.

    @cached_property
    def _missing(self) -> int:
        """Number of samples by which the dataset's last block is smaller than the others."""
        return self.num_blocks * self.block_samples - self.num_samples

    @cached_property
    def _short_slot(self) -> int:
        """Slot of the dataset's last block."""
        last = np.array([self.num_blocks - 1])
        key = epoch_key(self.seed, self.epoch, purpose=_BLOCKS)
        return int(permute(last, num_values=self.num_blocks, key=key, direction=Direction.INVERSE)[0])

    def _blocks_in(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        key = epoch_key(self.seed, self.epoch, purpose=_BLOCKS)
        return permute(slots, num_values=self.num_blocks, key=key)

    def _slots_at(self, where: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the slot of each position, and the offset within its block."""
        after_short = (self._short_slot + 1) * self.block_samples - self._missing
        slots, offsets = np.divmod(where + self._missing * (where >= after_short), self.block_samples)
        return slots, offsets

    def _first_position(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the position at which each window begins; the end of the epoch for the window after the last."""
        slots = np.minimum(windows * self.window_blocks, self.num_blocks)
        return slots * self.block_samples - self._missing * (slots > self._short_slot)
