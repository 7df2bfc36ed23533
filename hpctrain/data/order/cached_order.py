"""Evaluates an order 4096 positions at a time: for a few positions the calls cost more than the arithmetic."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import Order

_BLOCK_POSITIONS = 4096
# Several threads make batches, so positions on both sides of a block border are needed.
_KEPT_BLOCKS = 3
# With more ranks, each needs only a small part of a block.
_MOST_RANKS = 4


def ahead_for(order: Order, *, num_ranks: int) -> Order:
    """Returns the order, wrapped in `OrderAhead` if there are so few ranks that it saves time."""
    return OrderAhead(order) if num_ranks <= _MOST_RANKS else order


class OrderAhead:
    """Caches another order in blocks of 4096 positions, 32 KiB each, and keeps the last 3 made. Thread-safe."""

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
