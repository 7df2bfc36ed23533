from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpctrain.data import (
    Blocks,
    Dataset,
    Loader,
    TorchIterableDataset,
    batches_on,
    pack_arrays,
    torch_iterable_dataset,
    torch_map_dataset,
)
from hpctrain.data.loading.batch import one_ahead
from hpctrain.errors import DataError, UsageError

NUM_SAMPLES = 50


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    label = np.arange(NUM_SAMPLES, dtype=np.uint16)
    pack_arrays(directory, {"x": np.repeat(label[:, None], 4, axis=1), "label": label}, shard_samples=20)
    return directory


def labels(batches: Any) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


def test_samples_by_number_have_dtypes_that_torch_computes_with(directory: Path) -> None:
    dataset = torch_map_dataset(directory)
    assert len(dataset) == NUM_SAMPLES
    sample = dataset[21]
    assert isinstance(sample, dict)
    assert sample["x"].tolist() == [21] * 4
    assert sample["x"].dtype == torch.int32
    assert sample["label"].shape == ()
    assert [int(s["label"]) for s in dataset.__getitems__([7, 40, 7])] == [7, 40, 7]  # type: ignore[call-overload]
    last = dataset[-1]
    assert isinstance(last, dict)
    assert int(last["label"]) == NUM_SAMPLES - 1
    for outside in (NUM_SAMPLES, -NUM_SAMPLES - 1):
        with pytest.raises(IndexError, match="is out of range; number of samples: 50"):
            dataset[outside]
    with pytest.raises(UsageError, match="no field 'y'; its fields are x, label"):
        torch_map_dataset(directory, fields=["x", "y"])


def test_an_existing_script_gets_its_batches_from_a_data_loader(directory: Path) -> None:
    dataset = torch_map_dataset(Dataset.open(directory), fields=["label", "x"])
    for options in ({}, {"num_workers": 2, "multiprocessing_context": "fork"}):
        seen = []
        for label, x in DataLoader(dataset, batch_size=8, shuffle=True, **options):
            assert torch.equal(x, label[:, None].expand(-1, 4))
            seen += label.tolist()
        assert sorted(seen) == list(range(NUM_SAMPLES))


def test_spawned_workers_of_a_data_loader_read_both_kinds(directory: Path) -> None:
    spawned: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    dataset = torch_iterable_dataset(directory, global_batch=8, seed=2)
    expected = labels(Loader(dataset_of(directory), global_batch=8, seed=2))
    assert labels(DataLoader(dataset, batch_size=None, **spawned)) == expected
    copy = pickle.loads(pickle.dumps(torch_map_dataset(directory)))  # what spawning does with it
    assert int(copy[3]["label"]) == 3


def dataset_of(directory: Path) -> Dataset:
    return Dataset.open(directory)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_the_batches_are_the_loaders_in_its_order_whatever_the_workers(
    directory: Path, num_workers: int
) -> None:
    options: dict[str, Any] = {"global_batch": 9, "rank": 1, "num_ranks": 2, "seed": 3, "last_batch": "keep"}
    expected = [labels(Loader(dataset_of(directory), **options).epoch(epoch)) for epoch in (0, 1)]
    dataset = torch_iterable_dataset(directory, **options)
    assert len(dataset) == 6
    loader = DataLoader(
        dataset, batch_size=None, num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        assert labels(loader) == expected[epoch]


def test_epochs_follow_each_other_in_one_process(directory: Path) -> None:
    dataset = torch_iterable_dataset(directory, global_batch=25)
    loader = Loader(dataset_of(directory), global_batch=25)
    assert [labels(dataset), labels(dataset)] == [labels(loader.epoch(0)), labels(loader.epoch(1))]


def test_a_kept_state_goes_on_at_the_next_batch_on_other_ranks(directory: Path) -> None:
    options: dict[str, Any] = {
        "global_batch": 12,
        "seed": 5,
        "order": Blocks(block_samples=4, window_blocks=3),
    }
    whole = labels(torch_iterable_dataset(directory, **options))
    for taken in range(len(whole) + 1):
        before = torch_iterable_dataset(directory, **options)
        batches = iter(before)
        assert labels(itertools.islice(batches, taken)) == whole[:taken]
        state = json.loads(json.dumps(before.state_dict()))
        del batches
        parts = []
        for rank in range(3):
            after = torch_iterable_dataset(directory, rank=rank, num_ranks=3, **options)
            after.load_state_dict(state)
            after.set_epoch(0)  # as a script's loop over epochs does first
            parts.append(labels(after))
            assert after.state_dict()["place"]["epoch"] == 1
        joined = [list(itertools.chain(*batch)) for batch in zip(*parts, strict=True)]
        assert joined == whole[taken:]
        before.set_epoch(0)
        assert labels(before) == whole


def test_each_workers_state_goes_on_at_its_own_next_batch(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = labels(torch_iterable_dataset(directory, global_batch=8))

    def worker(number: int) -> TorchIterableDataset:
        monkeypatch.setattr("hpctrain.data.loading.torch_dataset._worker", lambda: (number, 3))
        return torch_iterable_dataset(directory, global_batch=8)

    for number in range(3):
        before = worker(number)
        own = whole[number::3]
        batches = iter(before)
        assert labels(itertools.islice(batches, 1)) == own[:1]
        state = before.state_dict()
        after = worker(number)
        after.load_state_dict(state)
        assert labels(after) == own[1:]
    monkeypatch.setattr("hpctrain.data.loading.torch_dataset._worker", lambda: (0, 2))
    with pytest.raises(DataError, match="by 3 workers, now there are 2"):
        torch_iterable_dataset(directory, global_batch=8).load_state_dict(state)


def test_a_state_that_does_not_fit_is_refused(directory: Path, tmp_path: Path) -> None:
    state = torch_iterable_dataset(directory, global_batch=8, seed=1).state_dict()
    with pytest.raises(DataError, match="with seed 1, the dataset has seed 2"):
        torch_iterable_dataset(directory, global_batch=8, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="order"):
        torch_iterable_dataset(directory, global_batch=8, seed=1, shuffle=False).load_state_dict(state)
    with pytest.raises(DataError, match="not a state of a dataset"):
        torch_iterable_dataset(directory, global_batch=8).load_state_dict({"epoch": 1})


def test_batches_for_the_cpu_come_in_order_and_none_is_held_back(directory: Path) -> None:
    loader = Loader(dataset_of(directory), global_batch=8)
    moved = batches_on("cpu", loader.epoch(0))
    assert next(moved).stop == loader.position == 8
    assert [batch.start for batch in moved] == [8, 16, 24, 32, 40, 48]


def test_the_copy_of_the_next_batch_is_begun_before_a_batch_is_handed_out() -> None:
    events: list[str] = []

    def begin(item: int) -> int:
        events.append(f"begin {item}")
        return 10 * item

    for item in one_ahead(iter([1, 2, 3]), begin=begin, finish=lambda item: events.append(f"finish {item}")):
        events.append(f"use {item}")
    assert events == [
        "begin 1", "finish 10", "begin 2", "use 10", "finish 20", "begin 3", "use 20", "finish 30", "use 30",
    ]  # fmt: skip


def test_an_error_surfaces_behind_the_batch_that_was_copied_before_it(tmp_path: Path) -> None:
    pack_arrays(tmp_path, {"x": np.zeros((30, 2))}, shard_samples=10)
    dataset = Dataset.open(tmp_path)
    (tmp_path / "shard-00001.h5").unlink()
    batches = Loader(dataset, global_batch=10, shuffle=False).epoch(0)
    moved = one_ahead(batches, begin=lambda batch: batch.to("cpu"), finish=lambda batch: None)
    assert next(moved).stop == 10
    with pytest.raises(DataError, match=r"shard-00001.h5"):
        next(moved)
