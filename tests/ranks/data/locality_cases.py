"""What each rank does in the tests of locality: run by `run_ranks`, or on threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.checkpoint.engines.write_engines import write_collectively
from hpctrain.comm import on_rank_0
from hpctrain.data import Dataset, EpochOrder, Loader, index_files
from hpctrain.data.locality.collective_dataset import CollectiveDataset
from hpctrain.data.locality.memory_store import MemoryStore
from hpctrain.errors import DataError, HpctrainError


def same(found: Any, expected: Any) -> bool:
    return set(found) == set(expected) and all(
        found[name].dtype == expected[name].dtype and np.array_equal(found[name], expected[name])
        for name in expected
    )


def gather_from_memory(world: Any, directory: str) -> dict[str, Any]:
    """Whether all kinds of gathers from the store equal those from the files, by two threads at once."""
    dataset = Dataset.open(directory)
    store = MemoryStore.load(world, dataset)
    rng = np.random.default_rng(world.rank)
    wrong: list[str] = []

    def compare(name: str, indices: Any) -> None:
        indices = np.asarray(indices, dtype=np.int64)
        if not same(store.gather(indices), dataset.gather(indices)):
            wrong.append(name)

    def many() -> None:
        own = np.random.default_rng(threading.get_ident())
        for _ in range(25):
            compare("in a thread", own.integers(0, dataset.num_samples, own.integers(0, 40)))

    compare("none", [])
    compare("all in order", np.arange(dataset.num_samples))
    compare("shuffled", rng.permutation(dataset.num_samples))
    compare("the same one", [dataset.num_samples - 1] * 5)
    threads = [threading.Thread(target=many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    indices = rng.integers(0, dataset.num_samples, 9)
    expected = dataset.gather(indices)
    # Memory of the caller's: rows of a larger array, in one piece or with gaps.
    apart = {name: np.zeros((9, 2, *array.shape[1:]), array.dtype) for name, array in expected.items()}
    store.gather(indices, out={name: array[:, 0] for name, array in apart.items()})
    if not same({name: array[:, 0] for name, array in apart.items()}, expected):
        wrong.append("into memory with gaps")
    if any(array[:, 1].any() for array in apart.values()):
        wrong.append("beside the caller's memory")

    labels = []
    loader = Loader(store, global_batch=12, rank=world.rank, num_ranks=world.num_ranks, seed=5, num_threads=2)
    for batch in loader.epoch(1):
        labels.append(batch["label"].tolist())
    refused = []
    for indices in (np.array([-1]), np.array([dataset.num_samples])):
        try:
            store.gather(indices)
        except DataError as error:
            refused.append(str(error))
    held = store.layout.num_bytes(world.rank)
    store.close()
    store.close()
    try:
        store.gather(np.array([0]))
    except DataError as error:
        refused.append(str(error))
    return {"wrong": wrong, "labels": labels, "refused": refused, "held_bytes": held}


def read_together(world: Any, directory: str) -> dict[str, Any]:
    """Collective reading: ranks with many samples, few and none, and a file that gets shorter."""
    dataset = Dataset.open(directory)
    together = CollectiveDataset.open(world, dataset)
    wrong: list[str] = []
    rng = np.random.default_rng(40 + world.rank)
    for turn in range(6):
        count = 0 if (turn + world.rank) % 3 == 0 else int(rng.integers(1, 60))
        indices = rng.integers(0, dataset.num_samples, count)
        if not same(together.gather(indices), dataset.gather(indices)):
            wrong.append(f"turn {turn}")
    if not same(together.gather(np.empty(0, dtype=np.int64)), dataset.gather(np.empty(0, dtype=np.int64))):
        wrong.append("nothing at all")
    labels = []
    loader = Loader(together, global_batch=12, rank=world.rank, num_ranks=world.num_ranks, seed=5)
    with loader.epoch(1) as batches:
        next(batches)  # an epoch that is left early: no rank is ahead of the others
    for batch in loader.epoch(1):
        labels.append(batch["label"].tolist())

    refused = []
    if world.rank == world.num_ranks - 1:
        path = Path(directory, dataset.manifest.shards[0].file)
        os.truncate(path, path.stat().st_size - 1)
    world.barrier()
    # Only the last rank asks for a sample of the shard that is shorter now; then only rank 0 asks for nonsense.
    for asked in (
        [0] if world.rank == world.num_ranks - 1 else [100],
        [dataset.num_samples] if world.rank == 0 else [50],
    ):
        try:
            together.gather(np.array(asked))
        except DataError as error:
            refused.append(f"{error.agreed} {error}")
    together.close()
    together.close()
    return {"wrong": wrong, "labels": labels, "refused": refused}


def load_what_one_rank_cannot_read(world: Any, directory: str) -> str:
    """A shard of one rank's part is gone when the store is filled: what each rank raises."""
    dataset = Dataset.open(directory)
    world.barrier()
    if world.rank == 0:
        Path(directory, dataset.manifest.shards[-1].file).unlink()
    world.barrier()
    try:
        MemoryStore.load(world, dataset)
    except HpctrainError as error:
        return f"{type(error).__name__} {error.agreed} {error}"
    return "loaded"


def ask_for_too_much(world: Any) -> str:
    """More memory than any node has, asked for by one rank."""
    try:
        world.remote_memory(1 << 50 if world.rank == world.num_ranks - 1 else 0)
    except HpctrainError as error:
        return f"{type(error).__name__} {error.agreed} {error}"
    return "given"


def everything_of_locality(world: Any, directory: str, shortened: str, broken: str) -> dict[str, Any]:
    """All cases in one launch."""
    return {
        "memory": gather_from_memory(world, directory),
        "together": read_together(world, shortened),
        "too much": ask_for_too_much(world) if world.backend in ("mpi", "horovod") else None,
        "broken": load_what_one_rank_cannot_read(world, broken),
    }


def expected_labels(num_samples: int, *, num_ranks: int, rank: int) -> list[list[int]]:
    """The labels of rank's batches of epoch 1, where sample i has label i."""
    order = EpochOrder(num_samples=num_samples, seed=5, epoch=1)
    batches = []
    for start in range(0, num_samples, 12):
        stop = min(start + 12, num_samples)
        share, extra = divmod(stop - start, num_ranks)
        first = start + rank * share + min(rank, extra)
        batches.append(order.at(first, first + share + (rank < extra)).tolist())
    return batches


ROWS, ROW_BYTES = 2051, 1 << 20  # more bytes than a 32-bit count of MPI can hold


def over_two_gib(world: Any, directory: str) -> None:
    """On two ranks: rank 0 writes more than 2^31 bytes of a file through MPI-IO, then reads them in one gather."""
    path = Path(directory) / "large.h5"
    offset = on_rank_0(world, lambda: _allocate(path))
    mine, count = (0, ROWS) if world.rank == 0 else (ROWS, 1)
    rows = np.repeat(np.arange(mine, mine + count, dtype=np.int64).astype(np.uint8), ROW_BYTES)
    write_collectively(path, [(offset + mine * ROW_BYTES, rows.data)], comm=world)
    del rows
    index_files(Path(directory) / "index", files=[str(path)], fields="x=/x", comm=world)
    together = CollectiveDataset.open(world, Dataset.open(Path(directory) / "index"))
    indices = np.arange(ROWS + 1)[::-1] if world.rank == 0 else np.array([ROWS, 3])
    found = together.gather(indices)["x"]
    together.close()
    assert len(found) == len(indices)
    assert [(int(row.min()), int(row.max())) for row in found] == [
        (i % 256, i % 256) for i in indices.tolist()
    ]


def _allocate(path: Path) -> int:
    """Makes a file whose dataset has a place but was never written. Returns the offset of its first byte."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((ROWS + 1, ROW_BYTES))
    with h5py.File(path, "w") as file:
        return int(h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, plist).get_offset())
