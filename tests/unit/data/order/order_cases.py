"""Orders of every kind, and samples that are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import (
    Blocks,
    FieldSpec,
    Fixed,
    OrderSpec,
    Sequential,
    Shuffled,
    Stratified,
    Weighted,
)
from hpctrain.data.loading.prefetch import EpochPlan
from hpctrain.data.order.epoch_order import LastBatch, Order, PositionRange, num_batches

KINDS = ("shuffle", "sequential", "blocks", "stratified", "weighted", "fixed")
ONCE = tuple(kind for kind in KINDS if kind != "weighted")  # every sample exactly once per epoch


def batch_spans(order: Order, *, batch: int, last: LastBatch, start: int = 0) -> Iterator[PositionRange]:
    """The positions of each global batch of an epoch, from `start` on."""
    count = num_batches(order.num_samples, global_batch=batch, last_batch=last, start=start)
    plan = EpochPlan(order=order, start=start, every=1, global_batch=batch, num_batches=count)
    return map(plan.span, range(count))


def spec_of(kind: str, num_samples: int, *, block: int = 7, window: int = 3) -> OrderSpec:
    """An order of each kind; weights and classes are odd functions of the sample."""
    numbers = np.arange(num_samples)
    return {
        "shuffle": Shuffled(),
        "sequential": Sequential(),
        "blocks": Blocks(block_samples=block, window_blocks=window),
        "stratified": Stratified(classes=numbers * 7919 % 11 // 3),
        "weighted": Weighted(weights=(numbers + 1) % 4 + 0.25),
        "fixed": Fixed(of=Shuffled()),
    }[kind]


def mixing(order: Order) -> tuple[float, float]:
    """Mean displacement as a share of the epoch, and the share of neighbours in the files kept side by side."""
    found = order.at(0, order.num_samples)
    displacement = float(np.abs(found - np.arange(order.num_samples)).mean()) / order.num_samples
    return displacement, float((np.abs(np.diff(found)) == 1).mean())


class Numbers:
    """Samples that are their own index, and are nowhere."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.fields = {"number": FieldSpec(dtype="int64", shape=(1,))}

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        array = indices[:, None]
        if out is not None:
            out["number"][...] = array
        return {"number": array}
