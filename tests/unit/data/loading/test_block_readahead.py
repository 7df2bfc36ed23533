"""Blocks are asked for before they are read: just the bytes of a window and the next."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import Blocks, Dataset, Loader, Shuffled, pack_arrays, pack_tokens
from hpctrain.data.loading.prefetch import ReadAhead, read_ahead_for
from hpctrain.data.order.epoch_order import PositionRange
from hpctrain.data.order.order_spec import BlockOrder


def test_the_bytes_asked_for_are_those_of_the_windows_samples(tmp_path: Path) -> None:
    x = np.arange(103 * 16, dtype=np.int32).reshape(103, 16)
    pack_arrays(tmp_path / "d", {"x": x, "label": np.arange(103)}, shard_samples=40)
    pack_tokens(tmp_path / "t", iter([np.arange(900) % 251]), window=32, stride=8, shard_bytes=300)
    for directory in (tmp_path / "d", tmp_path / "t"):
        dataset = Dataset.open(directory)
        order = BlockOrder(num_samples=dataset.num_samples, block_samples=9, window_blocks=3, seed=1)
        ahead = ReadAhead(dataset, order=order)
        content = {shard.file: (directory / shard.file).read_bytes() for shard in dataset.manifest.shards}
        for window in range(order.num_windows):
            pieces = [content[s.file][s.offset : s.offset + s.num_bytes] for s in ahead.byte_ranges(window)]
            for block in order.blocks_of(window):
                for array in dataset.gather(np.arange(*block)).values():
                    assert all(any(row.tobytes() in piece for piece in pieces) for row in array)
            if dataset.manifest.tokens is None:
                samples = sum(block.num_samples for block in order.blocks_of(window))
                assert sum(map(len, pieces)) == samples * (64 + 8)


def test_a_loader_asks_once_for_each_window_and_one_window_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_arrays(tmp_path, {"x": np.arange(120, dtype=np.int64)}, shard_samples=50)
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: asked.append(length // 8))
    monkeypatch.setattr(
        "hpctrain.data.loading.prefetch._is_cached", lambda descriptor, part: False
    )  # just written
    dataset = Dataset.open(tmp_path)
    loader = Loader(dataset, global_batch=20, order=Blocks(block_samples=10, window_blocks=2))
    spans = [PositionRange(first, first + 20) for first in range(0, 120, 20)]
    ahead = read_ahead_for(dataset, loader.order.for_epoch(0, num_samples=120, seed=0))
    assert ahead is not None
    totals = []
    for span in [spans[0], spans[0], *spans[1:]]:
        ahead.before(span)
        totals.append(sum(asked))
    assert totals == [40, 40, 60, 80, 100, 120, 120]
    asked.clear()
    assert len(list(loader.epoch(0))) == 6
    assert sum(asked) == 120
    asked.clear()
    list(Loader(dataset, global_batch=20, order=Shuffled()).epoch(0))
    assert asked == []
