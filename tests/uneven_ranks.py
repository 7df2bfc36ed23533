"""Ranks that reduce at their own speeds, telling now and then how far they have filled their buckets."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from hpctrain.reduce.contract.bucket_reducer import Backoff
from hpctrain.reduce.shared_memory.all_reduce_reducer import PIECE_ELEMS, AllReduceReducer


def fill_and_sum(
    reducer: AllReduceReducer,
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
    in_flight = [reducer.reduce(number) for number in range(len(buffers))]
    backoff = Backoff()
    while in_flight:
        turns = pace.choice(in_flight)
        try:
            if not next(turns):
                backoff.wait(eager=False)
        except StopIteration:
            in_flight.remove(turns)
