"""An order evaluated some thousand positions at a time: a few at a time cost more calls than arithmetic."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import Order

_BLOCK_POSITIONS = 4096
# Batches are made by several threads, around the border of two blocks.
_KEPT_BLOCKS = 3
# With more ranks, most of a block is other ranks'.
_MOST_RANKS = 4


def ahead_for(order: Order, *, num_ranks: int) -> Order:
    """The same order, evaluated ahead where one of `num_ranks` ranks needs enough of what that gives."""
    return OrderAhead(order) if num_ranks <= _MOST_RANKS else order


class OrderAhead:
    """Another order's positions, the last blocks of them kept: 32 KiB each. Safe in threads."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    @property
    def num_samples(self) -> int:
        return self._order.num_samples

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `Order.at`."""
        inside = 0 <= start < stop <= self.num_samples
        if not inside or stop - start >= _BLOCK_POSITIONS:
            return self._order.at(start, stop)
        first, last = start // _BLOCK_POSITIONS, (stop - 1) // _BLOCK_POSITIONS
        begin = start - first * _BLOCK_POSITIONS
        blocks = [self._block(number) for number in range(first, last + 1)]
        positions = blocks[0] if first == last else np.concatenate(blocks)
        return positions[begin : begin + stop - start].copy()

    def _block(self, number: int) -> NDArray[np.int64]:
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                begin = number * _BLOCK_POSITIONS
                block = self._order.at(begin, min(begin + _BLOCK_POSITIONS, self.num_samples))
                self._blocks[number] = block
                if len(self._blocks) > _KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
            return block
