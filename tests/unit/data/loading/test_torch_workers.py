"""`torch_iterable_dataset` in the workers of a DataLoader: which epoch each iteration reads, and from where."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from hpctrain.data import TorchIterableDataset, pack_arrays, torch_iterable_dataset

CONTEXTS = ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.thorough)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    pack_arrays(directory, {"x": np.arange(40)})
    return directory


def dataset_of(directory: Path) -> TorchIterableDataset:
    return torch_iterable_dataset(directory, global_batch=4, seed=1)


def loader_of(
    dataset: TorchIterableDataset, workers: int, *, context: str = "fork", persistent: bool = True
) -> DataLoader[Any]:
    if not workers:
        return DataLoader(dataset, batch_size=None)
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=persistent,
        multiprocessing_context=context, prefetch_factor=3,
    )  # fmt: skip


def batches(loader: DataLoader[Any], *, count: int | None = None) -> list[list[int]]:
    return [batch["x"].tolist() for batch in itertools.islice(loader, count)]


def epoch_of(directory: Path, epoch: int) -> list[list[int]]:
    dataset = dataset_of(directory)
    dataset.set_epoch(epoch)
    return batches(loader_of(dataset, 0))


@pytest.fixture(scope="module")
def epochs(directory: Path) -> list[list[list[int]]]:
    found = [epoch_of(directory, epoch) for epoch in range(8)]
    assert len({str(batches) for batches in found}) == 8
    return found


@pytest.fixture(autouse=True)
def torch_may_fork() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create 3 worker")
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield


@pytest.mark.parametrize("context", CONTEXTS)
def test_persistent_workers_read_the_epoch_that_was_set(
    directory: Path, epochs: list[list[list[int]]], context: str
) -> None:
    dataset = dataset_of(directory)
    loader = loader_of(dataset, 2, context=context)
    for epoch in (0, 7):
        dataset.set_epoch(epoch)
        assert batches(loader) == epochs[epoch]
    for epoch in (2, 2, 1):  # left early, with batches that workers have made ahead
        dataset.set_epoch(epoch)
        assert batches(loader, count=3) == epochs[epoch][:3]
    # Without set_epoch each iteration is the next epoch, however the one before ended.
    assert batches(loader) == epochs[2]
    assert batches(loader, count=1) == epochs[3][:1]
    assert batches(loader) == epochs[4]
    state = state_after(directory, epoch=5, taken=3)
    dataset.load_state_dict(state)
    dataset.set_epoch(5)
    assert batches(loader) == epochs[5][3:]
    dataset.set_epoch(5)
    assert batches(loader) == epochs[5]


def state_after(directory: Path, *, epoch: int, taken: int) -> dict[str, Any]:
    dataset = dataset_of(directory)
    dataset.set_epoch(epoch)
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    return dataset.state_dict()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_iteration_is_the_next_epoch_even_if_the_one_before_was_left(
    directory: Path, epochs: list[list[list[int]]], workers: int
) -> None:
    dataset = dataset_of(directory)
    loader = loader_of(dataset, workers)
    assert batches(loader, count=2) == epochs[0][:2]
    assert batches(loader) == epochs[1]
    dataset.load_state_dict(state_after(directory, epoch=3, taken=4))
    assert batches(loader, count=2) == epochs[3][4:6]
    assert batches(loader) == epochs[4]
    dataset.set_epoch(6)
    dataset.set_epoch(6)
    assert batches(loader) == epochs[6]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_saved_without_workers_is_resumed_by_several(
    directory: Path, epochs: list[list[list[int]]], persistent: bool
) -> None:
    dataset = dataset_of(directory)
    dataset.load_state_dict(state_after(directory, epoch=1, taken=5))
    loader = loader_of(dataset, 2, persistent=persistent)
    assert batches(loader) == epochs[1][5:]
    dataset.set_epoch(1)
    assert batches(loader) == epochs[1]


def test_two_loaders_of_one_dataset_read_the_epoch_set_before_each(
    directory: Path, epochs: list[list[list[int]]]
) -> None:
    dataset = dataset_of(directory)
    first, second = loader_of(dataset, 2), loader_of(dataset, 1)
    for turn in (0, 2):
        dataset.set_epoch(turn)
        one = iter(first)
        head = [next(one)["x"].tolist()]
        dataset.set_epoch(turn + 1)
        assert batches(second) == epochs[turn + 1]
        assert head + [batch["x"].tolist() for batch in one] == epochs[turn]


def test_a_copy_of_a_dataset_has_an_epoch_of_its_own(directory: Path, epochs: list[list[list[int]]]) -> None:
    dataset = dataset_of(directory)
    loader, other = loader_of(dataset, 1), loader_of(copy.deepcopy(dataset), 1)
    assert batches(loader, count=1) == batches(other, count=1) == epochs[0][:1]
    dataset.set_epoch(5)
    assert batches(other, count=1) == epochs[1][:1]
    assert batches(loader, count=1) == epochs[5][:1]


def _read(dataset: TorchIterableDataset, epoch: int, out: Any) -> None:
    loader = loader_of(dataset, 1)
    found = []
    for number in (epoch, epoch + 1):
        dataset.set_epoch(number)
        found.append(batches(loader, count=2))
    out.put(found)


def test_processes_that_share_a_dataset_set_their_own_epochs(
    directory: Path, epochs: list[list[list[int]]]
) -> None:
    dataset = dataset_of(directory)
    loader = loader_of(dataset, 1)
    assert batches(loader, count=1) == epochs[0][:1]
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    process = context.Process(target=_read, args=(dataset, 4, out))
    process.start()
    assert out.get(timeout=300) == [epochs[4][:2], epochs[5][:2]]
    process.join(300)
    assert batches(loader, count=1) == epochs[1][:1]  # not the other process's


def test_new_workers_that_repeat_an_epoch_warn_once(
    directory: Path, epochs: list[list[list[int]]], capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = dataset_of(directory)
    loader = loader_of(dataset, 1, persistent=False)
    for _ in range(3):
        assert batches(loader) == epochs[0]
    assert capfd.readouterr().err.count("read epoch 0 again, in the same order: call set_epoch") == 1


def test_the_main_process_says_that_it_does_not_know_its_workers_position(directory: Path) -> None:
    dataset = dataset_of(directory)
    dataset.set_epoch(2)
    dataset.state_dict()  # at the beginning of an epoch it knows
    batches(loader_of(dataset, 1), count=3)
    with pytest.warns(UserWarning, match="it returns the beginning of epoch 2"):
        state = dataset.state_dict()
    assert state["place"]["epoch"] == 2
    dataset.set_epoch(3)
    assert dataset.state_dict()["place"]["epoch"] == 3
