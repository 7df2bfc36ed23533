"""The usual reader of HDF5 files: a map-style dataset over h5py, and torch's DataLoader with two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from benchmarks.data.kinds import Kind
from benchmarks.data.serve import Reader

WORKERS = 2


class Hdf5(Dataset[Any]):
    """Opens its files in the worker that reads: an inherited handle reads wrong data (pytorch#11887)."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind = kind
        self._paths = sorted(directory.glob("shard-*.h5"))
        self._files: list[Any] | None = None
        self._starts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._kind.num_samples

    def __getitem__(self, index: int) -> Any:
        if self._files is None:
            import h5py

            self._files = [h5py.File(path, "r") for path in self._paths]
            self._starts = np.cumsum([0, *(len(next(iter(file.values()))) for file in self._files)])
        if self._kind.tokens:
            start = index * self._kind.window
            found = self._files[0]["tokens"][start : start + self._kind.window + 1]
            return torch.from_numpy(found.astype(np.int32))
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, row = self._files[shard], index - int(self._starts[shard])
        return torch.from_numpy(file["x"][row]), int(file["label"][row])


class FromLoader:
    """A Reader over a DataLoader, or over a pipeline that contains the DataLoader `around`. Workers start with the
    first epoch and stay."""

    def __init__(self, loader: Any, *, around: DataLoader[Any] | None = None) -> None:
        self._loader = loader
        self._workers = around if around is not None else loader

    def epoch(self, number: int) -> Iterator[tuple[int, NDArray[Any] | None]]:
        for batch in self._loader:
            samples = batch[0] if isinstance(batch, (list, tuple)) else batch
            yield len(samples), np.asarray(samples)

    def close(self) -> None:
        # Otherwise the workers would run until the loader is garbage-collected.
        if self._workers._iterator is not None:
            self._workers._iterator._shutdown_workers()
        del self._loader, self._workers


def open_reader(method: str, kind: Kind, *, directory: str) -> Reader:
    dataset = Hdf5(kind, Path(directory))
    return FromLoader(
        DataLoader(
            dataset, batch_size=kind.batch, shuffle=True, num_workers=WORKERS, persistent_workers=True,
            multiprocessing_context="fork",
        )
    )  # fmt: skip
