"""Datasets that are opened with checks, and damaged in known places."""

from __future__ import annotations

from pathlib import Path

from hpctrain.data import (
    Dataset,
    read_manifest,
)
from hpctrain.data.integrity.read_checker import CheckMode, check_while_reading
from tests.unit.data.integrity.test_verify import flip_bit

SAMPLES, SHARD_SAMPLES, IMAGE_BYTES, BLOCK_BYTES = 90, 35, 256, 1024


def open_checked(directory: Path, mode: CheckMode = CheckMode.FIRST_EPOCH) -> Dataset:
    dataset = Dataset.open(directory)
    check_while_reading(dataset, mode=mode)
    return dataset


def flip_in(directory: Path, field: str, *, shard: int, byte: int) -> None:
    """Flip a bit of byte `byte` of a field of a shard."""
    entry = read_manifest(directory).shards[shard]
    offset = entry.fields[field].offset
    assert offset is not None
    flip_bit(directory / entry.file, offset=offset + byte)
