from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from hpctrain.data import Batch, Dataset, EpochOrder, FieldSpec, LastBatch, Loader, pack_arrays
from hpctrain.data.loading.batch import BatchMemory
from hpctrain.errors import DataError, ExitCode, RecipeError

NUM_SAMPLES = 103


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    directory = tmp_path_factory.mktemp("data")
    label = np.arange(NUM_SAMPLES)
    fields = {"x": np.repeat(label[:, None], 4, axis=1).astype(np.float32), "label": label}
    pack_arrays(directory, fields, shard_samples=40)
    return Dataset.open(directory)


class Source:
    """Samples that are numbers, with a count of the arrays alive and a fault to order."""

    def __init__(self, num_samples: int = 1000, *, fail_at: int | None = None, dtype: str = "int64") -> None:
        self.num_samples = num_samples
        self.fields = {"number": FieldSpec(dtype=dtype, shape=(128,))}
        self.fail_at = fail_at
        self.gathered = 0
        self.lock = threading.Lock()

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        with self.lock:
            self.gathered += 1
        if self.fail_at is not None and self.fail_at in indices:
            raise DataError(f"sample {self.fail_at} is gone")
        array = np.repeat(indices[:, None], 128, axis=1)
        if out is not None and "number" in out:
            out["number"][...] = array
            return dict(out)
        return {"number": array.astype(self.fields["number"].dtype)}


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hpctrain-data")]


@given(
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(1, 16),
    st.sampled_from([1, 3]),
    st.data(),
)
def test_each_sample_once_per_epoch_over_an_interruption_on_other_ranks(
    dataset: Dataset, batch: int, ranks_before: int, ranks_after: int, num_threads: int, data: st.DataObject
) -> None:
    batch = max(batch, ranks_before, ranks_after)
    steps = data.draw(st.integers(0, -(-NUM_SAMPLES // batch)))
    globally: list[list[int]] = [[] for _ in range(-(-NUM_SAMPLES // batch))]
    position = 0
    for rank in range(ranks_before):
        loader = Loader(
            dataset, global_batch=batch, rank=rank, num_ranks=ranks_before, seed=4, num_threads=num_threads
        )
        with loader.epoch(2) as batches:
            for number, part in enumerate(itertools.islice(batches, steps)):
                globally[number] += part["label"].tolist()
                assert np.array_equal(part["x"][:, 0], part["label"])
        position = loader.position
    for rank in range(ranks_after):
        loader = Loader(dataset, global_batch=batch, rank=rank, num_ranks=ranks_after, seed=4)
        for number, part in enumerate(loader.epoch(2, start=position)):
            globally[steps + number] += part["label"].tolist()
        assert loader.position == NUM_SAMPLES
    order = EpochOrder(num_samples=NUM_SAMPLES, seed=4, epoch=2).at(0, NUM_SAMPLES).tolist()
    assert list(itertools.chain(*globally)) == order
    assert [len(b) for b in globally[:-1]] == [batch] * (len(globally) - 1)


def test_a_batch_tells_its_place_and_its_weight(dataset: Dataset) -> None:
    for rank in range(4):
        loader = Loader(dataset, global_batch=10, rank=rank, num_ranks=4)
        batches = list(loader.epoch(0))
        assert len(batches) == len(loader) == loader.batches_per_epoch == 11
        assert [b.start for b in batches] == list(range(0, 103, 10))
        assert [b.global_samples for b in batches] == [10] * 10 + [3]
        assert batches[0].num_samples == len(batches[0]["x"]) == [3, 3, 2, 2][rank]
        assert batches[0].weight == batches[0].num_samples / 10
        assert batches[-1].num_samples == [1, 1, 1, 0][rank]
        assert batches[-1].stop == loader.position == NUM_SAMPLES


def test_a_task_may_change_the_dict_of_fields_that_it_gets(dataset: Dataset) -> None:
    """The batch is computed again where memory ran out, so what a task does to its dict must not stay."""
    with Loader(dataset, global_batch=10).epoch(0) as batches:
        batch = next(iter(batches))
    for part in batch.split(1):
        part.to("cpu").fields.clear()
        part.to("cpu", dtype=torch.float64).fields.clear()
    assert set(batch.fields) == {"x", "label"}


def test_a_rank_without_samples_gets_an_empty_batch_of_the_right_shape(dataset: Dataset) -> None:
    last = list(Loader(dataset, global_batch=102, rank=50, num_ranks=60).epoch(0))[-1]
    assert (last.num_samples, last.global_samples, last.weight) == (0, 1, 0.0)
    assert last["x"].shape == (0, 4)
    assert last["x"].dtype == torch.float32
    assert [part.num_samples for part in last.split(2)] == [0, 0]


def test_weighted_means_of_the_ranks_are_the_mean_of_the_global_batch(dataset: Dataset) -> None:
    for parts in (1, 2, 5):
        sums = [0.0] * 6
        for rank in range(7):
            for number, batch in enumerate(Loader(dataset, global_batch=20, rank=rank, num_ranks=7).epoch(0)):
                for part in batch.split(parts):
                    if part.num_samples:
                        sums[number] += part.weight * float(part["label"].double().mean())
        order = EpochOrder(num_samples=NUM_SAMPLES).at(0, NUM_SAMPLES)
        expected = [order[k : k + 20].mean() for k in range(0, NUM_SAMPLES, 20)]
        assert sums == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 30), st.integers(1, 12))
def test_micro_batches_are_balanced_views_that_make_up_the_batch(num_samples: int, num_parts: int) -> None:
    fields = {"x": torch.arange(num_samples)}
    batch = Batch(fields=fields, epoch=3, start=40, num_samples=num_samples, global_samples=31)
    parts = batch.split(num_parts)
    sizes = [part.num_samples for part in parts]
    assert len(parts) == num_parts
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part["x"] for part in parts]), fields["x"])
    assert sum(part.weight for part in parts) == pytest.approx(batch.weight)
    assert {(p.epoch, p.start, p.global_samples) for p in parts} == {(3, 40, 31)}


def test_the_last_batch_can_be_dropped(dataset: Dataset) -> None:
    loader = Loader(dataset, global_batch=50, last_batch="drop")
    assert [batch.num_samples for batch in loader.epoch(0)] == [50, 50]
    assert loader.position == 100
    assert Loader(dataset, global_batch=50, last_batch=LastBatch.KEEP).batches_per_epoch == 3


def test_without_shuffle_batches_come_in_order(dataset: Dataset) -> None:
    labels = [batch["label"].tolist() for batch in Loader(dataset, global_batch=40, shuffle=False).epoch(5)]
    assert list(itertools.chain(*labels)) == list(range(NUM_SAMPLES))


def test_a_loader_can_be_iterated_by_itself(dataset: Dataset) -> None:
    assert sum(batch.num_samples for batch in Loader(dataset, global_batch=8)) == NUM_SAMPLES


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetching_is_bounded_in_bytes(num_threads: int, depth: int) -> None:
    source = Source()
    batch_bytes = 10 * 128 * 8
    loader = Loader(source, global_batch=10, prefetch_bytes=depth * batch_bytes + 7, num_threads=num_threads)
    assert loader.prefetch_batches == depth
    with loader.epoch(0) as batches:
        for taken in range(20):
            deadline = time.monotonic() + 300
            while source.gathered < taken + depth and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)  # room for one too many
            assert source.gathered == taken + depth
            next(batches)


def test_a_batch_larger_than_the_prefetch_memory_is_still_made() -> None:
    loader = Loader(Source(30), global_batch=10, prefetch_bytes=1)
    assert [batch.num_samples for batch in loader.epoch(0)] == [10, 10, 10]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_surfaces_where_its_batch_would_have_come(num_threads: int) -> None:
    loader = Loader(Source(fail_at=45), global_batch=10, shuffle=False, num_threads=num_threads)
    batches = loader.epoch(0)
    assert [next(batches).start for _ in range(4)] == [0, 10, 20, 30]
    with pytest.raises(DataError, match="sample 45 is gone"):
        next(batches)
    assert loader.position == 40
    with pytest.raises(StopIteration):
        next(batches)
    assert loader_threads() == []


def test_closing_early_joins_the_threads() -> None:
    batches = Loader(Source(), global_batch=10, num_threads=2, prefetch_bytes=1).epoch(0)
    next(batches)
    assert len(loader_threads()) == 2
    batches.close()
    batches.close()
    assert loader_threads() == []
    with pytest.raises(StopIteration):
        next(batches)


def test_leaving_a_loop_early_leaves_no_threads() -> None:
    before = loader_threads()  # another test's may be about to end
    for _ in Loader(Source(), global_batch=10).epoch(0):
        break
    gc.collect()
    assert set(loader_threads()) <= set(before)


def test_a_program_that_ends_with_an_open_iterator_ends(tmp_path: Path) -> None:
    pack_arrays(tmp_path, {"x": np.zeros((500, 64))}, shard_samples=50)
    program = (
        "import sys\n"
        "from hpctrain.data import Dataset, Loader\n"
        "loader = Loader(Dataset.open(sys.argv[1]), global_batch=4, num_threads=3)\n"
        "batches = loader.epoch(0)\n"
        "print(next(batches).num_samples)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (result.stdout, result.stderr) == ("4\n", "")


def test_a_finished_epoch_leaves_no_threads() -> None:
    list(Loader(Source(), global_batch=100, num_threads=3).epoch(0))
    assert loader_threads() == []


def test_waiting_for_batches_is_counted() -> None:
    class Slow(Source):
        def gather(
            self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
        ) -> dict[str, NDArray[Any]]:
            time.sleep(0.02)
            return super().gather(indices, out=out)

    loader = Loader(Slow(50), global_batch=10)
    list(loader.epoch(0))
    list(loader.epoch(1))
    # 10 batches, each made in at least 20 ms, by the loader's thread and the one that waits, while nothing else is done
    assert loader.wait_s >= 0.08


def test_unsigned_integers_become_dtypes_that_torch_computes_with() -> None:
    for stored, expected in (("uint16", torch.int32), ("uint32", torch.int64), ("uint8", torch.uint8)):
        (batch,) = Loader(Source(100, dtype=stored), global_batch=100, shuffle=False).epoch(0)
        assert batch["number"].dtype == expected
        assert batch["number"][:, 0].tolist() == list(range(100))


def test_batches_keep_their_content_when_later_ones_are_made(dataset: Dataset) -> None:
    batches = list(Loader(dataset, global_batch=10, prefetch_bytes=1).epoch(0))
    copies = [batch["label"].clone() for batch in batches]
    order = EpochOrder(num_samples=NUM_SAMPLES).at(0, NUM_SAMPLES)
    assert np.array_equal(torch.cat(copies), order)
    batch = batches[0].to("cpu")
    assert (batch.start, batch.num_samples) == (0, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch": 3, "num_ranks": 4},
            "a global batch of 3 samples cannot be split over 4 ranks: make it",
        ),
        ({"global_batch": 0}, "a global batch of 0 samples cannot be split over 1 ranks"),
        ({"global_batch": 200, "last_batch": "drop"}, "is never full with 103 samples"),
        ({"global_batch": 8, "rank": 2, "num_ranks": 2}, "rank 2 is not one of 2 ranks"),
        ({"global_batch": 8, "num_threads": 0}, "num_threads is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    dataset: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        Loader(dataset, **options)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_place_outside_the_epoch_is_refused(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="resume at sample 104 of an epoch, but the epoch has 103 samples"):
        Loader(dataset, global_batch=8).epoch(0, start=104)
    assert list(Loader(dataset, global_batch=8).epoch(0, start=103)) == []


def test_a_missing_shard_surfaces_in_the_consumer(tmp_path: Path) -> None:
    pack_arrays(tmp_path, {"x": np.zeros((50, 2))}, shard_samples=10)
    dataset = Dataset.open(tmp_path)
    (tmp_path / "shard-00003.h5").unlink()
    with pytest.raises(DataError, match=r"shard .*shard-00003.h5"):
        list(Loader(dataset, global_batch=10).epoch(0))
    assert loader_threads() == []


def test_a_source_that_does_not_say_so_is_read_by_one_thread() -> None:
    callers = set()

    class OneThread(Source):
        def gather(
            self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
        ) -> dict[str, NDArray[Any]]:
            callers.add(threading.current_thread().name)
            time.sleep(0.002)
            return super().gather(indices, out=out)

    list(Loader(OneThread(100), global_batch=10).epoch(0))
    assert len(callers) == 1


def test_unused_memory_of_batches_of_many_lengths_stays_within_its_bound() -> None:
    memory = BatchMemory(kept_bytes=4 << 20)
    for length in range(1, 40):
        tensors = [memory.empty((length, 100_000), dtype=np.dtype(np.uint8)) for _ in range(3)]
        del tensors
        assert sum(size * len(unused) for size, unused in memory._unused.items()) <= 4 << 20
