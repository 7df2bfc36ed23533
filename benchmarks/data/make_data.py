"""Writes the samples of a kind as hpctrain's shards, plain or in chunks compressed with gzip."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from benchmarks.data.kinds import Kind, blocks, stream
from hpctrain.data import pack_arrays, pack_tokens, read_manifest

GZIP_LEVEL = 4


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
