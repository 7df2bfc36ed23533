from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import Batch, Dataset, Loader, TransformContext, WorkerPool, pack_arrays
from hpctrain.data.transforms.shared_memory import map_arrays, write_arrays
from hpctrain.data.transforms.worker_pool import worker_environment
from hpctrain.errors import DataError, ExitCode, RecipeError
from tests.states import is_alive, wait_for
from tests.unit.data.transforms import worker_transforms

pytestmark = pytest.mark.timing

NUM_SAMPLES = 60
BY_NAME = "tests.unit.data.transforms.worker_transforms:"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    directory = tmp_path_factory.mktemp("data")
    label = np.arange(NUM_SAMPLES, dtype=np.int32)
    x = np.repeat(label[:, None], 32, axis=1).astype(np.float32)
    pack_arrays(directory, {"x": x, "label": label}, shard_samples=25)
    return Dataset.open(directory)


def context(num_rows: int) -> TransformContext:
    return TransformContext(seed=1, epoch=0, start=0, indices=np.arange(num_rows))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return all(
        list(a.fields) == list(b.fields) and all(torch.equal(a[name], b[name]) for name in a.fields)
        for a, b in zip(left, right, strict=True)
    )


def shared_bytes_named() -> list[str]:
    """Shared memory of ours that has a name somewhere, and would stay."""
    return [name for name in os.listdir("/dev/shm") if "hpctrain-batch" in name]


def test_workers_and_threads_make_the_same_batches_for_any_number_of_them(dataset: Dataset) -> None:
    def batches(**options: Any) -> list[Batch]:
        return list(Loader(dataset, global_batch=8, seed=5, **options).epoch(1))

    plain = batches()
    by_function = batches(transform=worker_transforms.augment)
    assert same(by_function, batches(transform=BY_NAME + "augment", num_threads=3))
    assert same(by_function, batches(transform=BY_NAME + "augment", workers=1))
    assert same(by_function, batches(transform=worker_transforms.augment, workers=3))
    for before, after in zip(plain, by_function, strict=True):
        assert list(after.fields) == ["x", "label", "draw", "big"]
        assert torch.equal(after["x"], 2 * before["x"])
        assert torch.equal(after["label"], before["label"])
        assert after["big"].dtype == torch.int32  # big-endian uint16 in the transform
        assert torch.equal(after["big"], before["label"])
        assert (after.start, after.num_samples) == (before.start, before.num_samples)


def test_random_numbers_belong_to_the_samples_and_not_to_the_ranks(dataset: Dataset) -> None:
    def draws(num_ranks: int, epoch: int, workers: int = 0) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank in range(num_ranks):
            loader = Loader(
                dataset, global_batch=12, rank=rank, num_ranks=num_ranks, transform=BY_NAME + "augment",
                workers=workers,
            )  # fmt: skip
            for batch in loader.epoch(epoch):
                found.update(zip(batch["label"].tolist(), batch["draw"].tolist(), strict=True))
        return found

    alone = draws(1, 0)
    assert len(set(alone.values())) == NUM_SAMPLES
    assert alone == draws(3, 0) == draws(1, 0, workers=2)
    assert not set(alone.values()) & set(draws(1, 1).values())


def test_a_rank_without_samples_gets_the_fields_that_the_transform_makes(dataset: Dataset) -> None:
    for workers in (0, 1):
        loader = Loader(
            dataset, global_batch=59, rank=50, num_ranks=59, transform=BY_NAME + "augment", workers=workers
        )
        (last,) = loader.epoch(0, start=59)
        assert last.num_samples == 0
        assert {name: tuple(tensor.shape) for name, tensor in last.fields.items()} == {
            "x": (0, 32), "label": (0,), "draw": (0,), "big": (0,),
        }  # fmt: skip
        assert last["x"].dtype == torch.float32


def test_a_worker_is_no_rank_and_starts_without_torch(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "HOROVOD_RANK"):
        monkeypatch.setenv(name, "0")
    assert "PMI_RANK" not in worker_environment({"PMI_RANK": "1", "HOME": "/"})
    loader = Loader(dataset, global_batch=20, transform=BY_NAME + "process", workers=2)
    facts = torch.cat([batch["facts"] for batch in loader.epoch(0)])
    assert os.getpid() not in facts[:, 0].tolist()
    assert set(facts[:, 1].tolist()) == {os.getpid()}
    assert facts[:, 2:].sum() == 0


def test_a_killed_worker_is_replaced_and_its_batch_made_again(
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HPCTRAIN_TEST_MARK", str(tmp_path / "mark"))
    loader = Loader(dataset, global_batch=8, transform=BY_NAME + "die_once", workers=2)
    begin = time.monotonic()
    batches = list(loader.epoch(0))
    assert time.monotonic() - begin < 10
    assert (tmp_path / "mark").exists()
    assert same(batches, list(Loader(dataset, global_batch=8).epoch(0)))
    reported = capfd.readouterr().err
    assert reported.count("\n") == 1
    assert re.match(
        r"hpctrain: a batch is transformed again: worker \d+ was killed by signal 9 \(SIGKILL\)", reported
    )


def test_workers_killed_while_idle_do_not_count_against_the_next_batch() -> None:
    with_pool = WorkerPool(BY_NAME + "augment", num_workers=6)  # more than a batch may be made again
    arrays = {"x": np.ones((3, 2), np.float32), "label": np.zeros(3)}
    with_pool(dict(arrays), context=context(3))
    for pid in (killed := with_pool.pids):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in killed))
    made = with_pool(dict(arrays), context=context(3))
    assert made["x"].tolist() == [[2, 2]] * 3
    assert with_pool.num_deaths == 6
    pids = with_pool.pids
    with_pool.close()
    with_pool.close()
    assert len(pids) == 6
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(DataError, match="loader was closed"):
        with_pool(arrays, context=context(3))


def test_signals_for_the_run_are_left_to_the_rank() -> None:
    pool = WorkerPool(BY_NAME + "augment", num_workers=1)
    arrays = {"x": np.ones((3, 2), np.float32), "label": np.zeros(3)}
    pool(dict(arrays), context=context(3))
    (pid,) = pool.pids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert pool(dict(arrays), context=context(3))["x"].shape == (3, 2)
    assert (pool.pids, pool.num_deaths) == ([pid], 0)
    pool.close()
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("name", "how"),
    [("die_always", r"killed by signal 9 \(SIGKILL\): possibly out of memory"), ("leave", "exit code 9")],
)
def test_a_batch_that_kills_every_worker_ends_the_run_with_code_3(
    dataset: Dataset, name: str, how: str
) -> None:
    loader = Loader(dataset, global_batch=8, shuffle=False, transform=BY_NAME + name, workers=2)
    begin = time.monotonic()
    with pytest.raises(DataError, match=f"4 workers died one after another .*{how}") as caught:
        list(loader.epoch(0))
    assert time.monotonic() - begin < 10
    assert caught.value.exit_code is ExitCode.DATA


def test_an_error_of_the_transform_names_it_and_shows_where_it_was_raised(dataset: Dataset) -> None:
    for workers in (0, 2):
        loader = Loader(dataset, global_batch=10, shuffle=False, transform=BY_NAME + "fail", workers=workers)
        batches = loader.epoch(0)
        assert [next(batches).start for _ in range(4)] == [0, 10, 20, 30]
        with pytest.raises(
            DataError, match=r"fail raised ValueError: label 45 is odd \(samples 40, 41"
        ) as error:
            next(batches)
        if workers:
            assert 'raise ValueError("label 45 is odd")' in str(error.value)
        else:
            assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_rows", r"'x' of shape \(1, 32\) for 20 samples: the first dimension must be 20"),
        ("text", "field 'x' of dtype <U1: a dtype that torch supports"),
        ("nothing", "returned NoneType, but must return a dict"),
    ],
)
def test_what_a_transform_may_not_return_is_refused(dataset: Dataset, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(Loader(dataset, global_batch=20, transform=BY_NAME + name).epoch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": "worker_transforms"}, "the name of a transform must have the form 'module:function'"),
        ({"transform": BY_NAME + "absent"}, "has no attribute 'absent'"),
        ({"transform": "absent.module:f", "workers": 1}, "No module named 'absent'"),
        ({"transform": BY_NAME + "number"}, "is not a function, but int"),
        ({"transform": lambda fields: fields, "workers": 1}, "top level of a module"),
        ({"workers": 2}, "without a transform"),
        ({"transform": BY_NAME + "fail", "workers": -1}, "workers = -1"),
    ],
)
def test_transforms_that_cannot_be_had_are_refused_at_once(
    dataset: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        Loader(dataset, global_batch=8, **options)


def test_workers_end_and_memory_is_freed_when_their_parent_is_killed(
    tmp_path: Path, dataset: Dataset
) -> None:
    mark = tmp_path / "pid"
    program = (
        "import sys\n"
        "from hpctrain.data import Dataset, Loader\n"
        "loader = Loader(Dataset.open(sys.argv[1]), global_batch=4,"
        " transform='tests.unit.data.transforms.worker_transforms:slow', workers=1)\n"
        "next(loader.epoch(0))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(dataset.directory)],
        env={**os.environ, "HPCTRAIN_TEST_MARK": str(mark)},
        cwd=Path(__file__).resolve().parents[4],
    )
    try:
        wait_for(lambda: mark.exists() and mark.read_text())
        worker = int(mark.read_text())
        assert is_alive(worker)
    finally:
        parent.kill()
        parent.wait()
    # The worker is in the midst of Python code that would take a minute.
    wait_for(lambda: not is_alive(worker))
    assert shared_bytes_named() == []


def test_a_loader_that_is_collected_leaves_no_process(dataset: Dataset) -> None:
    loader = Loader(dataset, global_batch=8, transform=BY_NAME + "process", workers=2)
    batches = loader.epoch(0)
    pids = set(next(batches)["facts"][:, 0].tolist())
    assert all(is_alive(pid) for pid in pids)
    del loader, batches
    gc.collect()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def test_memory_is_freed_with_the_batches_that_lie_in_it() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("hpctrain-batch")

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    pool = WorkerPool(BY_NAME + "augment", num_workers=1)
    arrays = {"x": np.ones((4, 1 << 17), np.float32), "label": np.zeros(4)}
    kept = [pool(arrays, context=context(4))]
    files = open_files()
    kept += [pool(arrays, context=context(4)) for _ in range(5)]
    assert mapped() == 6
    assert open_files() == files  # batches that are kept hold no file descriptors
    small = pool({"x": np.ones((4, 2)), "label": np.zeros(4)}, context=context(4))
    assert mapped() == 6  # a small batch is copied
    alone = kept[3]["x"]
    kept.clear()
    gc.collect()
    assert mapped() == 1
    assert float(alone.sum()) == 4 * 2 * (1 << 17)
    assert small["x"].tolist() == [[2, 2]] * 4
    del alone
    assert mapped() == 0
    pool.close()


def test_shared_arrays_are_private_to_the_process_that_maps_them() -> None:
    arrays = {
        "scalar_rows": np.arange(3, dtype=np.int8),
        "none": np.zeros((0, 4)),
        "flags": np.array([[True], [False]]),
        "strided": np.arange(12, dtype=np.float16).reshape(3, 4)[:, ::2],
    }
    descriptor, description = write_arrays(arrays)
    first, second = map_arrays(descriptor, description), map_arrays(descriptor, description)
    os.close(descriptor)
    for name, array in arrays.items():
        assert np.array_equal(first[name], array)
        assert first[name].dtype == array.dtype
    first["strided"][...] = 0
    assert np.array_equal(second["strided"], arrays["strided"])


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).resolve().parents[4] / "docs" / "guides" / "data-workers.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    for block in blocks:
        exec(compile(block, str(guide), "exec"), names)
    assert len(blocks) == 5
    assert names["state"]["place"]["epoch"] == 1
