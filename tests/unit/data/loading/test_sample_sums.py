"""Batches know their samples, and the sum of a step's samples is the same however many ranks share them."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.data import (
    Dataset,
    LastBatch,
    Loader,
    add_sample_sums,
    pack_arrays,
    sample_sum,
    show_sample_sum,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    directory = tmp_path_factory.mktemp("data")
    pack_arrays(directory, {"number": np.arange(103)}, shard_samples=40)
    return Dataset.open(directory)


def step_sums(dataset: Dataset, num_ranks: int, **options: object) -> list[str]:
    loaders = [
        Loader(dataset, global_batch=16, rank=rank, num_ranks=num_ranks, seed=3, **options)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    sums = []
    for parts in zip(*(loader.epoch(1) for loader in loaders), strict=True):
        for part in parts:
            assert part.indices is not None
            assert part.indices.tolist() == part["number"].tolist()
        sums.append(
            add_sample_sums(show_sample_sum(sample_sum(part.indices[: part.num_samples])) for part in parts)
        )
    return sums


@pytest.mark.parametrize("last_batch", list(LastBatch))
def test_ranks_together_have_the_sums_of_one(dataset: Dataset, last_batch: LastBatch) -> None:
    alone = step_sums(dataset, 1, last_batch=last_batch)
    assert len(set(alone)) == len(alone) >= 6
    for num_ranks in (2, 3, 5):
        assert step_sums(dataset, num_ranks, last_batch=last_batch) == alone
    assert step_sums(dataset, 2, last_batch=last_batch, shuffle=False) != alone


def test_parts_of_a_batch_keep_their_numbers(dataset: Dataset) -> None:
    *_, last = Loader(dataset, global_batch=16, last_batch=LastBatch.PAD).epoch(0)
    assert last.num_padded > 0
    for part in (*last.split(3), last.real(), last.to("cpu")):
        assert part.indices is not None
        assert part.indices.tolist() == part["number"].tolist()


def test_neighbouring_sets_have_different_sums() -> None:
    """Sets whose plain sums, and sums of squares, agree are told apart."""
    one, two = np.array([0, 4, 5]), np.array([1, 2, 6])
    assert one.sum() == two.sum()
    assert (one**2).sum() == (two**2).sum()
    assert sample_sum(one) != sample_sum(two)
    assert sample_sum(one) == sample_sum(one[::-1])
    assert sample_sum(np.array([], dtype=np.int64)) == 0
    generator = np.random.default_rng(0)
    found = {sample_sum(generator.choice(10_000, 64, replace=False)) for _ in range(500)}
    assert len(found) == 500
