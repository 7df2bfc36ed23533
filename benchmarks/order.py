"""How well the orders mix, and what computing a rank's part of a batch costs: `python -m benchmarks.order`.

The first table depends on the code only and is printed in docs/guides/data-order.md; the second one is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.memory import allocated_bytes
from hpctrain.data import Blocks, OrderSpec, PositionRange, Sequential, Shuffled, rank_share

SAMPLES = 2**18
BLOCK = 341  # samples of 12 KB in 4 MiB
BATCH = 256
CLASSES = 1024

ORDERS: dict[str, OrderSpec] = {
    "shuffle": Shuffled(),
    **{f"blocks, window {n}": Blocks(block_samples=BLOCK, window_blocks=n) for n in (256, 64, 16, 4)},
    "sequential": Sequential(),
}


def mixing(spec: OrderSpec) -> list[str]:
    """Returns the cells of a row of the first table: mean displacement, neighbours kept, classes in a batch, and how
    much more often than by chance two samples of one batch are in one batch again."""
    first, second = (
        spec.for_epoch(epoch, num_samples=SAMPLES, seed=1).at(0, SAMPLES) for epoch in (0, 1)
    )  # (SAMPLES,)
    displacement = np.abs(first - np.arange(SAMPLES)).mean() / SAMPLES
    kept = (np.abs(np.diff(first)) == 1).mean()
    batches = first[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)[::16]
    classes = np.mean([len(np.unique(batch * CLASSES // SAMPLES)) for batch in batches])
    batch_of = np.empty(SAMPLES, dtype=np.int64)
    batch_of[second] = np.arange(SAMPLES) // BATCH
    again = [len(batch) ** 2 for batch in batches]
    pairs = [int((np.unique(batch_of[batch], return_counts=True)[1] ** 2).sum()) - BATCH for batch in batches]
    meet = sum(pairs) / (sum(again) - BATCH * len(batches)) / ((BATCH - 1) / (SAMPLES - 1))
    return [f"{displacement:.3f}", f"{kept:.3%}", f"{classes:.0f}", f"{meet:,.1f}"]


def quality_rows() -> Iterator[str]:
    yield "| order | displacement | neighbours kept | classes in a batch | pairs that meet again |"
    yield "| --- | --- | --- | --- | --- |"
    for name, spec in ORDERS.items():
        yield f"| {name} | {' | '.join(mixing(spec))} |"


def cost(spec: OrderSpec) -> list[str]:
    """Returns the median time and the peak memory of computing a batch: rank 4,000 of 65,536, 32 samples per step,
    10^9 samples in the dataset."""
    span = rank_share(77 * 2**21, 78 * 2**21, rank=4000, num_ranks=65_536)
    seconds = []
    for number in range(300):
        began = time.perf_counter()
        _indices(spec, span, epoch=number)
        seconds.append(time.perf_counter() - began)
    peak = allocated_bytes(lambda: _indices(spec, span, epoch=0))
    return [f"{statistics.median(seconds) * 1e3:.2f} ms", f"{peak / 1e3:.0f} KB"]


def _indices(spec: OrderSpec, span: PositionRange, *, epoch: int) -> None:
    spec.for_epoch(epoch, num_samples=10**9, seed=1).at(*span)


def main() -> None:
    print("\n".join(quality_rows()))
    print("\n| order | time per batch | memory |\n| --- | --- | --- |")
    for name in ("shuffle", "blocks, window 64", "sequential"):
        print(f"| {name} | {' | '.join(cost(ORDERS[name]))} |")


if __name__ == "__main__":
    main()
