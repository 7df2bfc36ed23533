"""Readers to be timed: hpctrain's loader, raw reading of the same files, and the decompressor alone; and the shards
that they read."""

from __future__ import annotations

import gc
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data.kinds import Kind, blocks, stream
from benchmarks.data.serve import Reader
from benchmarks.memory import allocated_bytes, reset_peak, status_bytes
from hpctrain.bench.data.measure import time_waits
from hpctrain.data import Dataset, EpochOrder, Loader, pack_arrays, pack_tokens, read_manifest

SMALL_CACHE_BYTES = 2 << 20
GZIP_LEVEL = 4
# Batches after which the consumer pauses, so that the prefetch fills all the memory it is allowed.
PAUSES = (1, 40, 80)
PAUSE_S = 0.5

Batches = Iterator[tuple[int, "NDArray[Any] | None"]]


def field_of(kind: Kind) -> str:
    return "tokens" if kind.tokens else "x"


def open_reader(method: str, kind: Kind, *, directory: str) -> Reader:
    if method.startswith("ours"):
        return Ours(
            kind, Path(directory), num_threads=2 if method == "ours-2-threads" else 1,
            io="map" if method == "ours-map" else "auto",
        )  # fmt: skip
    if method == "zlib":
        return Zlib(kind, Path(directory))
    return Raw(kind, Path(directory), method=method)


def write_shards(kind: Kind, directory: Path) -> None:
    """Writes shards as `hpctrain data pack` does with its default options."""
    if kind.tokens:
        pack_tokens(directory, [stream(kind)], window=kind.window, dtype=kind.dtype)
        return
    samples = np.empty((kind.num_samples, *kind.shape), dtype=kind.dtype)
    for start, some in blocks(kind):
        samples[start : start + len(some)] = some
    pack_arrays(directory, {"x": samples, "label": np.arange(kind.num_samples)})


def write_compressed(kind: Kind, directory: Path, *, chunk_samples: int) -> None:
    """Writes the same dataset with gzip chunks of `chunk_samples` samples, as h5repack would."""
    write_shards(kind, directory)
    for shard in read_manifest(directory).shards:
        path = directory / shard.file
        with h5py.File(path, "r") as file:
            found = {name: dataset[...] for name, dataset in file.items()}
        path.unlink()
        with h5py.File(path, "w") as file:
            file.create_dataset(
                "x", data=found["x"], chunks=(chunk_samples, *kind.shape), compression="gzip",
                compression_opts=GZIP_LEVEL,
            )  # fmt: skip
            file.create_dataset("label", data=found["label"])


class Ours:
    """`Loader` as `hpctrain train` uses it; in sequential order for datasets whose name contains `in-order`.

    For compressed datasets the chunk cache is small, so that chunks are decoded again in each epoch. Their files are
    mapped, as they are by default when no memory limit is set.
    """

    def __init__(self, kind: Kind, directory: Path, *, num_threads: int, io: str) -> None:
        self._field = field_of(kind)
        options: dict[str, Any] = {"io": io}
        if "gzip" in directory.name:
            options |= {"cache_bytes": SMALL_CACHE_BYTES, "io": "map"}
        self._loader = Loader(
            Dataset.open(directory, **options), global_batch=kind.batch, num_threads=num_threads,
            shuffle="in-order" not in directory.name,
        )  # fmt: skip

    def epoch(self, number: int) -> Batches:
        with self._loader.epoch(number) as batches:
            for batch in batches:
                yield batch.num_samples, batch.fields[self._field].numpy()

    def close(self) -> None:
        del self._loader


class Raw:
    """Reads the bytes of the same samples in the same order, directly at their offsets in the files.

    method: `memmap` gathers from memory maps into a new array per batch, `memmap-buffer` into one reused array;
    `preadv` makes one system call per sample and field, into a new array per batch.
    """

    def __init__(self, kind: Kind, directory: Path, *, method: str) -> None:
        self._kind = kind
        self._method = method
        self._places: list[tuple[int, dict[str, tuple[int, int]]]] = []
        self._maps: list[dict[str, NDArray[Any]]] = []
        self._specs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        starts = [0]
        for path in sorted(directory.glob("shard-*.h5")):
            places, maps = {}, {}
            with h5py.File(path, "r") as file:
                for name, dataset in file.items():
                    offset, shape, step = dataset.id.get_offset(), dataset.shape[1:], dataset.dtype.itemsize
                    view = np.memmap(path, dataset.dtype, "r", offset=offset, shape=dataset.shape)
                    if kind.tokens:
                        view = np.lib.stride_tricks.sliding_window_view(view, kind.window + 1)[:: kind.window]
                        shape, step = view.shape[1:], step * kind.window
                    else:
                        step *= int(np.prod(shape, dtype=np.int64))
                    self._specs[name] = (shape, dataset.dtype)
                    places[name], maps[name] = (offset, step), view
            self._maps.append(maps)
            self._places.append((os.open(path, os.O_RDONLY), places))
            starts.append(starts[-1] + len(maps[field_of(kind)]))
        self._starts = np.array(starts)
        self._buffers = self._empty(kind.batch)

    def _empty(self, count: int) -> dict[str, NDArray[Any]]:
        return {name: np.empty((count, *shape), dtype) for name, (shape, dtype) in self._specs.items()}

    def epoch(self, number: int) -> Batches:
        order = EpochOrder(num_samples=self._kind.num_samples, epoch=number).at(0, self._kind.num_samples)
        read = self._preadv if self._method == "preadv" else self._memmap
        for start in range(0, len(order), self._kind.batch):
            indices = order[start : start + self._kind.batch]
            yield len(indices), read(indices)[field_of(self._kind)]

    def _memmap(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        out = self._buffers if self._method == "memmap-buffer" else None
        if len(self._maps) == 1 and not self._kind.tokens:
            return {
                name: np.take(view, indices, axis=0, out=None if out is None else out[name], mode="clip")
                for name, view in self._maps[0].items()
            }
        if len(self._maps) == 1:
            return {name: view[indices] for name, view in self._maps[0].items()}
        out = self._empty(len(indices)) if out is None else out
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        for name, array in out.items():
            for place, (shard, index) in enumerate(zip(shards, indices - self._starts[shards], strict=True)):
                array[place] = self._maps[shard][name][index]
        return out

    def _preadv(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        out = self._empty(len(indices))
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        rows = indices - self._starts[shards]
        for name, array in out.items():
            for place, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist(), strict=True)):
                descriptor, places = self._places[shard]
                offset, step = places[name]
                os.preadv(descriptor, [array[place : place + 1].view(np.uint8)], offset + row * step)
        return out

    def close(self) -> None:
        self._maps.clear()
        for descriptor, _ in self._places:
            os.close(descriptor)


class Zlib:
    """Decompression only: of the dataset's chunks, which are in memory already, with one thread per core."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind = kind
        chunks = []
        for path in sorted(directory.glob("shard-*.h5")):
            with h5py.File(path, "r") as file:
                dataset = file["x"]
                for start in range(0, len(dataset), dataset.chunks[0]):
                    chunks.append(dataset.id.read_direct_chunk((start, 0, 0, 0))[1])
        cores = len(os.sched_getaffinity(0))
        self._parts = [chunks[number::cores] for number in range(cores)]

    def epoch(self, number: int) -> Batches:
        def work(part: list[bytes]) -> None:
            for chunk in part:
                zlib.decompress(chunk)

        threads = [threading.Thread(target=work, args=(part,)) for part in self._parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield self._kind.num_samples, None

    def close(self) -> None:
        self._parts.clear()


def step_waits(*, directory: str, batch: int, step_s: float, num_steps: int) -> dict[str, Any]:
    """Runs steps that compute for `step_s` on one thread. Returns `waits_s`, the time that each step from the second on
    waited for its batch, and `first_s`, that of the first. Raises RuntimeError if there are fewer than two batches."""
    matrix = torch.ones(128, 128)

    def step(_: Any) -> None:
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)

    loader = Loader(Dataset.open(directory), global_batch=batch)
    with loader.epoch(0) as batches:
        wait = time_waits(iter(batches), step=step, step_s=step_s, num_steps=num_steps + 1)
    if wait is None:
        raise RuntimeError("the dataset has fewer than two batches")
    return {"waits_s": list(wait.waits_s), "first_s": wait.first_s}


def order_cost(*, num_samples: int, num_ranks: int, batch: int, repeats: int) -> dict[str, Any]:
    """Returns `seconds` (of each repetition) and `bytes` that computing one rank's part of a global batch takes."""
    order = EpochOrder(num_samples=num_samples, seed=1)
    positions = np.random.default_rng(0).integers(0, num_samples - batch * num_ranks, repeats).tolist()
    seconds = []
    for position in positions:
        begin = time.perf_counter()
        order.at(position, position + batch)
        seconds.append(time.perf_counter() - begin)

    def some_batches() -> None:
        fresh = EpochOrder(num_samples=num_samples, seed=2)
        for position in positions[:8]:
            fresh.at(position, position + batch)

    return {"seconds": seconds, "bytes": allocated_bytes(some_batches)}


def read_epoch(
    *, directory: str, batch: int, prefetch_bytes: int, open_options: dict[str, Any]
) -> dict[str, int]:
    """Reads an epoch. Returns in bytes: `idle`, the memory before the dataset is opened; `peak`, the maximum since
    then; `idle_anonymous` and `peak_anonymous`, the same without file pages, sampled after each batch.

    `peak` is the kernel's VmHWM, reset at the beginning. It includes mapped pages of the page cache.
    """
    gc.collect()
    reset_peak()
    idle, idle_anonymous = status_bytes("VmHWM"), status_bytes("RssAnon") + status_bytes("RssShmem")
    loader = Loader(
        Dataset.open(directory, **open_options), global_batch=batch, prefetch_bytes=prefetch_bytes
    )
    anonymous = num_samples = 0
    for number, one in enumerate(loader.epoch(0)):
        if number in PAUSES:
            time.sleep(PAUSE_S)
        num_samples += one.num_samples
        anonymous = max(anonymous, status_bytes("RssAnon") + status_bytes("RssShmem"))
    return {
        "idle": idle, "peak": status_bytes("VmHWM"), "idle_anonymous": idle_anonymous, "peak_anonymous": anonymous,
        "samples": num_samples,
    }  # fmt: skip
