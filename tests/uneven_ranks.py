"""Ranks that reduce at their own speeds, telling now and then how far they have filled their buckets."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from hpctrain.reduce.engine import EngineReducer
from hpctrain.reduce.node_sum import PIECE_ELEMS
from hpctrain.reduce.patience import Patience


def fill_and_sum(
    reducer: EngineReducer,
    *,
    values: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    pace: random.Random,
) -> None:
    """One step: each of `values` into its bucket bit by bit; then all reductions, in any turns."""
    for number, (wanted, buffer) in enumerate(zip(values, buffers, strict=True)):
        filled = 0
        while filled < len(wanted):
            more = min(len(wanted), filled + pace.randint(1, 2 * PIECE_ELEMS))
            buffer[filled:more] = wanted[filled:more]
            filled = more
            if pace.random() < 0.7:
                reducer.filled(number, filled)
            if pace.random() < 0.2:
                time.sleep(0.0005)
    under_way = [reducer.reduce(number) for number in range(len(buffers))]
    patience = Patience()
    while under_way:
        turns = pace.choice(under_way)
        try:
            if not next(turns):
                patience.wait(eager=False)
        except StopIteration:
            under_way.remove(turns)
