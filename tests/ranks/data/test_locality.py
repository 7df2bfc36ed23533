"""Samples from the ranks' memory and from files read together, on real ranks and on threads."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.comm import Monitored
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.collective_files import LocalFiles
from hpctrain.data import Dataset, index_files, pack_arrays
from hpctrain.data.locality.collective_dataset import CollectiveDataset
from hpctrain.data.locality.memory_store import MemoryStore
from hpctrain.errors import DataError
from tests.ranks.comm.test_large_buffers import needs_memory
from tests.ranks.data.locality_cases import everything_of_locality, expected_labels, over_two_gib, same
from tests.ranks_launcher import run_ranks

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
)
NUM_SAMPLES = 101


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("locality")
    rng = np.random.default_rng(1)
    fields: dict[str, Any] = {
        "image": rng.integers(0, 255, (NUM_SAMPLES, 5, 7), dtype=np.uint8),
        "volume": rng.random((NUM_SAMPLES, 3, 11), dtype=np.float32),
        "label": np.arange(NUM_SAMPLES),
    }
    pack_arrays(directory, fields, shard_samples=20, block_bytes=512)
    return directory


def check(outputs: list[Any], *, backend: str) -> None:
    num_ranks = len(outputs)
    for rank, output in enumerate(outputs):
        memory = output["memory"]
        assert memory["wrong"] == []
        assert memory["labels"] == expected_labels(NUM_SAMPLES, num_ranks=num_ranks, rank=rank)
        assert [text.split(",")[0] for text in memory["refused"]] == [
            "samples -1 to -1 were requested from a memory store",
            "samples 101 to 101 were requested from a memory store",
            "samples were requested from a memory store that is closed",
        ]
        together = output["together"]
        assert together["wrong"] == []
        assert together["labels"] == memory["labels"]
        assert len(together["refused"]) == 2
        assert together["refused"] == outputs[0]["together"]["refused"]
        assert "shard-00000.h5 has" in together["refused"][0]
        assert "samples 101 to 101 were requested from" in together["refused"][1]
        assert all(text.startswith("True ") for text in together["refused"])
        assert output["broken"] == outputs[0]["broken"]
        assert output["too much"] == outputs[0]["too much"]
    # No rank holds more than its share, and what padding to cache lines takes.
    whole = NUM_SAMPLES * (35 + 132 + 8)
    most = max(output["memory"]["held_bytes"] for output in outputs)
    assert whole / num_ranks <= most <= whole / num_ranks + (35 + 132 + 8) + 3 * 64
    assert outputs[0]["broken"].startswith("DataError True ")
    assert "shard-00005.h5" in outputs[0]["broken"]
    if backend in ("mpi", "horovod"):
        assert outputs[0]["too much"].startswith("CommunicationError True the ranks of the node of rank")
        assert "1125899907 MB" in outputs[0]["too much"]


def copies(dataset: Path, tmp_path: Path) -> list[str]:
    """The dataset, and two copies of it that a case damages."""
    return [str(dataset), *(str(shutil.copytree(dataset, tmp_path / f"copy-{k}")) for k in range(2))]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("num_ranks", "backend"), [pytest.param(2, "horovod", marks=needs_horovod), (3, "mpi")]
)
def test_ranks_read_from_each_others_memory_and_read_files_together(
    dataset: Path, tmp_path: Path, num_ranks: int, backend: str
) -> None:
    directories = map(str, copies(dataset, tmp_path))
    result = run_ranks(num_ranks, everything_of_locality, *directories, backend=backend)
    check(result.outputs, backend=backend)


@pytest.mark.launches
@pytest.mark.thorough  # 7 GB of memory, 2 GB of disk
def test_more_than_2_to_the_31_bytes_are_written_and_read_through_mpi_io(tmp_path: Path) -> None:
    needs_memory(3.5 * 2**31)
    try:
        run_ranks(2, over_two_gib, str(tmp_path), backend="mpi", timeout_s=800)
    finally:
        (tmp_path / "large.h5").unlink(missing_ok=True)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_threads_read_from_each_others_memory_and_read_files_together(
    dataset: Path, tmp_path: Path, num_ranks: int
) -> None:
    directories = copies(dataset, tmp_path)
    outputs = run_threads(num_ranks, lambda world: everything_of_locality(world, *directories))
    check(outputs, backend="threads")


def test_a_single_process_reads_as_many_do(dataset: Path, tmp_path: Path) -> None:
    world = Monitored(SerialWorld(), timeout_s=800)
    try:
        check([everything_of_locality(world, *copies(dataset, tmp_path))], backend="serial")
    finally:
        world.close()


class Forgetful:
    """Reads like `LocalFiles`, but leaves the last byte of some requests out and says nothing."""

    def __init__(self) -> None:
        self.files = LocalFiles()
        self.forgets = False

    def read(self, path: Path, *, offsets: Sequence[int], lengths: Sequence[int], out: Any) -> None:
        self.files.read(path, offsets=offsets, lengths=lengths, out=out)
        if self.forgets and path.name == "shard-00002.h5":
            out[-1] ^= 1

    def close(self) -> None:
        self.files.close()


def test_what_mpi_says_it_has_read_and_has_not_ends_the_run(dataset: Path) -> None:
    original = Dataset.open(dataset)
    files = Forgetful()
    together = CollectiveDataset(world=SerialWorld(), dataset=original, files=files)
    indices = np.arange(NUM_SAMPLES)[::-3]
    assert same(together.gather(indices), original.gather(indices))
    files.forgets = True
    with pytest.raises(
        DataError, match=r"MPI reported .*shard-00002.h5 on rank 0, but returned others"
    ) as raised:
        together.gather(indices)
    assert raised.value.agreed


def test_decoded_values_are_the_same_from_the_memory_of_ranks_and_from_files_read_together(
    tmp_path: Path,
) -> None:
    stored, missing = np.arange(40, dtype=np.int16), np.arange(40) % 7 == 0
    for number, scale in enumerate((0.5, 10.0)):
        with h5py.File(tmp_path / f"{number}.nc", "w") as file:
            file["x"], file["x.mask"] = stored, missing
            file["x"].attrs["scale_factor"], file["x"].attrs["_FillValue"] = scale, np.int16(3)
    index_files(tmp_path / "out", files=[str(tmp_path)], fields="x:cf:mask=/x")
    wanted = np.concatenate([stored * 0.5, stored * 10.0])
    gone = np.tile(missing | (stored == 3), 2)
    expected = {"x": np.where(gone, 0, wanted), "x.mask": gone}

    def read(world: Any) -> list[bool]:
        dataset = Dataset.open(tmp_path / "out")
        indices = np.random.default_rng(world.rank).permutation(80)
        asked = {name: array[indices] for name, array in expected.items()}
        store = MemoryStore.load(world, dataset)
        together = CollectiveDataset.open(world, dataset)
        found = [same(source.gather(indices), asked) for source in (dataset, store, together)]
        together.close()
        store.close()
        return found

    assert run_threads(2, read) == [[True] * 3] * 2
