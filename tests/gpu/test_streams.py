"""The order between CUDA streams: of the reduction thread, of copies, and of computation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm.interface.buffer_checks import on_host
from hpctrain.data import Dataset, Loader, batches_on, pack_arrays
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline
from tests.gpu.check import Check, LongKernels, assert_a_race_is_seen, assert_equal

NUM_BUCKETS = 4
NUM_SAMPLES = 200
GLOBAL_BATCH = 32


def test_streams(check: Check) -> None:
    """Long kernels fill the buckets, and reductions take long.

    A reduction that began too early would read zeros; a step that did not wait for it would read unreduced values."""
    work = LongKernels(check)
    if check.has_gpu:
        assert_a_race_is_seen(check, work)
    num_elems = check.of(gpu=1 << 20, cpu=1 << 10)
    values = [torch.randn(num_elems, generator=torch.Generator().manual_seed(n)) for n in range(NUM_BUCKETS)]
    for overlap in (True, False):
        for own_stream in (False, True):
            stream = torch.cuda.Stream(check.device) if check.has_gpu and own_stream else None
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                for where, reduce in (("through host memory", _through_host), ("on the device", _on_device)):
                    what = f"{where}, {'thread' if overlap else 'no thread'}"
                    _reduce_three_times(check, work, values, reduce, overlap=overlap, what=what)
    text = f"{8 * 3 * NUM_BUCKETS} buckets are the CPU's to the bit, with long kernels on both sides"
    check.found(text, needs_gpu=["streams and events"])


def _reduce_three_times(
    check: Check,
    work: LongKernels,
    values: list[torch.Tensor],
    reduce: Callable[[torch.Tensor, LongKernels], Iterator[bool]],
    *,
    overlap: bool,
    what: str,
) -> None:
    buckets = [torch.zeros_like(value, device=check.device) for value in values]
    sources = [value.to(check.device) for value in values]
    pipeline = ReductionPipeline(
        lambda number: reduce(buckets[number], work), device=check.device, overlap=overlap
    )
    try:
        for step in range(3):
            for number, (bucket, source) in enumerate(zip(buckets, sources, strict=True)):
                work.run()
                bucket.copy_(source * (step + 1))
                pipeline.submit(number)
            pipeline.wait()
            # Queued at once, as the optimizer's kernels are.
            results = [bucket + 0 for bucket in buckets]
            for result, value in zip(results, values, strict=True):
                assert_equal(result, (value * (step + 1)) * 3, what=f"a bucket reduced {what}, step {step}")
    finally:
        pipeline.close()


def _through_host(bucket: torch.Tensor, work: LongKernels) -> Iterator[bool]:
    with on_host(bucket) as host:
        host.mul_(3)
    yield True


def _on_device(bucket: torch.Tensor, work: LongKernels) -> Iterator[bool]:
    work.run()
    yield True
    bucket.mul_(3)


# ---------------------------------------------------------------------- batches


def test_pinned(check: Check) -> None:
    """Host memory is not overwritten while copies from it are still queued after long kernels."""
    dataset = _dataset(check.scratch)
    expected = [dict(batch.fields) for batch in Loader(dataset, global_batch=GLOBAL_BATCH).epoch(0)]
    work = LongKernels(check)
    moved: list[dict[str, torch.Tensor]] = []
    # Little is prefetched, so that the memory of a released batch is soon used again.
    loader = Loader(dataset, global_batch=GLOBAL_BATCH, pin_memory=check.has_gpu, prefetch_bytes=1)
    for batch in loader.epoch(0):
        if check.has_gpu:
            unpinned = [name for name, tensor in batch.fields.items() if not tensor.is_pinned()]
            assert not unpinned, f"fields {unpinned} of a batch are not in pinned memory"
        work.run()
        moved.append(batch.to(check.device).fields)
    _assert_batches(moved, expected, what="copied from the loader's memory")
    check.found(
        f"{len(moved)} batches are the CPU's to the bit", needs_gpu=["pinned memory", "its bandwidth"]
    )
    if check.has_gpu:
        check.figures["GB/s pinned"] = _copy_rate(check, pinned=True)
        check.figures["GB/s pageable"] = _copy_rate(check, pinned=False)


def test_ahead(check: Check) -> None:
    """Batches are copied to the device while kernels still use, and overwrite, the previous batch."""
    dataset = _dataset(check.scratch)
    expected = [dict(batch.fields) for batch in Loader(dataset, global_batch=GLOBAL_BATCH).epoch(0)]
    work = LongKernels(check)
    taken: list[dict[str, torch.Tensor]] = []
    loader = Loader(dataset, global_batch=GLOBAL_BATCH, pin_memory=check.has_gpu)
    begun_s = time.perf_counter()
    for batch in batches_on(check.device, loader.epoch(0)):
        work.run()
        taken.append({name: tensor + 0 for name, tensor in batch.fields.items()})
        if check.has_gpu:
            for tensor in batch.fields.values():
                tensor.zero_()  # must have ended when the batch's memory is used for a later batch
    check.wait()
    seconds = time.perf_counter() - begun_s
    _assert_batches(taken, expected, what="one ahead")
    check.found(f"{len(taken)} batches are the CPU's to the bit", needs_gpu=["the copying stream"])
    if check.has_gpu:
        check.figures["ms per batch with 30 ms of kernels"] = 1e3 * seconds / len(taken)


def _dataset(scratch: Path) -> Dataset:
    rng = np.random.default_rng(5)
    fields: dict[str, NDArray[Any]] = {
        "image": rng.integers(0, 255, (NUM_SAMPLES, 64, 64), dtype=np.uint8),
        "weight": rng.standard_normal((NUM_SAMPLES, 33)).astype(np.float32),
        "label": rng.integers(0, 1000, NUM_SAMPLES).astype(
            np.uint16
        ),  # converted to a wider type by the copy
    }
    pack_arrays(scratch / "data", fields)
    return Dataset.open(scratch / "data")


def _assert_batches(
    found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]], *, what: str
) -> None:
    for number, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        for name in wanted:
            assert_equal(mine[name], wanted[name], what=f"field {name} of batch {number}, {what}")


def _copy_rate(check: Check, *, pinned: bool) -> float:
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    target = torch.empty_like(source, device=check.device)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun_s)
    return source.numel() / min(times) / 1e9
