"""Small datasets, copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import (
    pack_arrays,
    pack_tokens,
)
from hpctrain.data.hdf5.filters import ChunkCodec, ShardCompression
from tests.unit.data.integrity.damaged_datasets import BLOCK_BYTES, SAMPLES, SHARD_SAMPLES


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of images, the same compressed, and one of token windows, three shards each."""
    random = np.random.default_rng(0)
    where = tmp_path_factory.mktemp("data")
    images = random.integers(0, 255, (SAMPLES, 16, 16), dtype=np.uint8)
    fields = {"image": images, "label": np.arange(SAMPLES)}
    pack_arrays(where / "images", fields, shard_samples=SHARD_SAMPLES, block_bytes=BLOCK_BYTES)
    pack_arrays(
        where / "compressed", {"image": images // 32}, shard_samples=SHARD_SAMPLES, block_bytes=BLOCK_BYTES,
        compression=ShardCompression(codec=ChunkCodec.GZIP, chunk_samples=6),
    )  # fmt: skip
    stream = [random.integers(0, 50000, 9000, dtype=np.uint16)]
    pack_tokens(
        where / "tokens",
        stream,
        window=32,
        stride=20,
        dtype="uint16",
        shard_bytes=8000,
        block_bytes=BLOCK_BYTES,
    )
    return where


@pytest.fixture
def images(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "images", tmp_path / "images"))


@pytest.fixture
def tokens(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "tokens", tmp_path / "tokens"))
