"""Copies of shards on the node's own storage: verified, bounded, shared, and gone when nobody uses them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data import Dataset, Loader, index_files, pack_arrays, read_manifest
from hpctrain.data.format.manifest import write_manifest
from hpctrain.data.locality.node_copies import PREFIX, clean_up
from hpctrain.data.locality.staged_dataset import StagedDataset
from hpctrain.errors import DataError, RecipeError
from tests.ranks_launcher import REPOSITORY
from tests.states import wait_for

pytestmark = pytest.mark.timing

NUM_SAMPLES, SHARD_SAMPLES = 120, 20
LARGE = 1 << 30


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    images = np.random.default_rng(0).integers(0, 255, (NUM_SAMPLES, 40, 50), dtype=np.uint8)
    pack_arrays(
        directory,
        {"image": images, "label": np.arange(NUM_SAMPLES)},
        shard_samples=SHARD_SAMPLES,
        block_bytes=4096,
    )
    return directory


def comes(staged: StagedDataset, copy: Path) -> bool:
    """Whether a copy is there and the reader has seen it."""
    there = copy.exists()
    staged.wait_until_staged(timeout_s=0.01)
    return there


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert np.array_equal(found[name], expected[name])


def test_samples_come_from_the_copies_once_they_are_there(dataset: Path, tmp_path: Path) -> None:
    original = Dataset.open(dataset)
    everything = original.gather(np.arange(NUM_SAMPLES))
    with StagedDataset.open(original, directory=tmp_path / "local", max_bytes=LARGE) as staged:
        assert_same(staged.gather(np.arange(NUM_SAMPLES)), everything)
        assert staged.wait_until_staged(timeout_s=300) == 1
        assert staged.problems == {}
        # The originals are not needed any more, not even by somebody who has them not open yet.
        shutil.rmtree(dataset)
        order = np.random.default_rng(1).permutation(NUM_SAMPLES)
        found = staged.gather(order)
        assert_same(found, {name: array[order] for name, array in everything.items()})
        out = {"image": np.empty((3, 40, 50), np.uint8)}
        assert staged.gather(np.array([5, 5, 119]), out=out)["image"] is out["image"]
        assert np.array_equal(out["image"], everything["image"][[5, 5, 119]])
        labels = [int(label) for batch in Loader(staged, global_batch=16, seed=3) for label in batch["label"]]
        assert sorted(labels) == list(range(NUM_SAMPLES))
        assert staged.staged_samples >= 2 * NUM_SAMPLES
        with pytest.raises(DataError, match="samples 120 to 120 were requested"):
            staged.gather(np.array([120]))
    assert list((tmp_path / "local").iterdir()) == []


def test_a_damaged_shard_is_not_staged_and_the_rest_is(dataset: Path, tmp_path: Path) -> None:
    manifest = read_manifest(dataset)
    expected = Dataset.open(dataset).gather(np.arange(NUM_SAMPLES))
    places = {1: manifest.shards[1].fields["image"].offset or 0, 4: 8}  # a sample; HDF5's own header
    for shard, place in places.items():
        descriptor = os.open(dataset / manifest.shards[shard].file, os.O_RDWR)
        byte = os.pread(descriptor, 1, place)[0] ^ 1
        os.pwrite(descriptor, bytes([byte]), place)
        os.close(descriptor)
    # The reader's checks are another matter: see `hpctrain.data.integrity.read_checker`.
    original = Dataset.open(dataset, verify="off")
    with StagedDataset.open(original, directory=tmp_path / "local", max_bytes=LARGE) as staged:
        wait_for(lambda: len(staged.problems) == 2 and len(list(staged.folder.glob("shard-*.h5"))) == 4)
        assert "shard-00001.h5 is damaged: bytes" in staged.problems["shard-00001.h5"]
        assert "HDF5 headers differ" in staged.problems["shard-00004.h5"]
        assert not list(staged.folder.glob(".copying-*"))
        whole = np.concatenate([np.arange(20), np.arange(40, 80), np.arange(100, 120)])
        mixed = np.concatenate([whole, [20]])
        staged.wait_until_staged(timeout_s=0.01)
        assert_same(staged.gather(whole), {name: array[whole] for name, array in expected.items()})
        found = staged.gather(mixed)
        assert np.array_equal(found["label"], mixed)
        assert int((found["image"][-1] != expected["image"][20]).sum()) == 1  # the original's damage
        assert staged.staged_samples == 2 * len(whole)


def test_ranks_share_one_folder_and_the_last_one_removes_it(dataset: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    first = StagedDataset.open(Dataset.open(dataset), directory=local, max_bytes=LARGE)
    second = StagedDataset.open(Dataset.open(dataset), directory=local, max_bytes=LARGE)
    assert first._stager is not None
    assert second._stager is None
    assert first.folder == second.folder
    assert second.wait_until_staged(timeout_s=300) == 1
    assert clean_up(local) == []
    first.close()
    assert np.array_equal(second.gather(np.arange(7))["label"], np.arange(7))
    assert second.staged_samples == 7
    wait_for(lambda: second.wait_until_staged(timeout_s=0.01) and second._stager is not None)
    second.close()
    second.close()
    assert list(local.iterdir()) == []


def test_the_bound_holds_and_what_was_read_makes_room_for_what_comes(dataset: Path, tmp_path: Path) -> None:
    original = Dataset.open(dataset)
    bound = 3 * max(shard.file_bytes for shard in original.manifest.shards) + 20_000
    over: list[int] = []
    ended = threading.Event()
    with StagedDataset.open(original, directory=tmp_path / "local", max_bytes=bound, idle_s=0.05) as staged:

        def watch() -> None:
            while not ended.is_set():
                with contextlib.suppress(FileNotFoundError):  # removed between the listing and the look
                    found = sum(path.stat().st_size for path in staged.folder.iterdir())
                    over.extend([found] if found > bound else [])
                time.sleep(0.005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for shard in range(6):
                rows = np.arange(shard * SHARD_SAMPLES, (shard + 1) * SHARD_SAMPLES)
                copy = staged.folder / original.manifest.shards[shard].file
                wait_for(functools.partial(comes, staged, copy))
                assert np.array_equal(staged.gather(rows)["label"], rows)
            assert staged.staged_samples == NUM_SAMPLES
        finally:
            ended.set()
            watcher.join()
        assert over == []
        assert len(list(staged.folder.glob("*.h5"))) <= 3


def test_a_copy_that_another_process_reads_stays(dataset: Path, tmp_path: Path) -> None:
    original = Dataset.open(dataset)
    bound = 2 * max(shard.file_bytes for shard in original.manifest.shards) + 20_000
    options: dict[str, Any] = {"directory": tmp_path / "local", "max_bytes": bound, "idle_s": 0.0}
    with (
        StagedDataset.open(original, **options) as reads,
        StagedDataset.open(Dataset.open(dataset), **options) as idle,
    ):
        wait_for(lambda: len(list(reads.folder.glob("shard-*.h5"))) == 2)
        idle.wait_until_staged(timeout_s=0.01)
        assert np.array_equal(idle.gather(np.arange(5))["label"], np.arange(5))  # holds shard 0 from now on
        assert idle.staged_samples == 5
        for _ in range(20):
            reads.wait_until_staged(timeout_s=0.01)
            idle_file = [path for path in reads.folder.iterdir() if "shard-00000" in path.name]
            assert len(idle_file) == 1  # under its name, or told to leave
            time.sleep(0.01)
        # Once its reader sees that it is to go, it goes, and others come.
        wait_for(
            lambda: (
                reads.wait_until_staged(timeout_s=0.01),
                idle.wait_until_staged(timeout_s=0.01),
                idle.gather(np.arange(25, 30)),
                (reads.folder / "shard-00002.h5").exists(),
            )[-1]
        )


KILLED = """
import sys, time
from hpctrain.data import Dataset
from hpctrain.data.locality.staged_dataset import StagedDataset
staged = StagedDataset.open(Dataset.open(sys.argv[1]), directory=sys.argv[2], max_bytes=1 << 30)
staged.wait_until_staged(timeout_s=300)
print("staged", flush=True)
time.sleep(60)
"""


def test_what_a_killed_run_leaves_is_removed_by_the_next(dataset: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(dataset), str(local)], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"staged\n"
        assert clean_up(local) == []  # it is alive
        process.send_signal(signal.SIGKILL)
        process.wait(300)
    (leftover,) = local.glob(f"{PREFIX}*")
    assert len(list(leftover.glob("*.h5"))) == 6
    other = tmp_path / "other"
    pack_arrays(other, {"x": np.arange(10)})
    with StagedDataset.open(Dataset.open(other), directory=local, max_bytes=LARGE) as staged:
        assert list(local.iterdir()) == [staged.folder] != [leftover]


def test_indexed_files_are_staged_under_names_of_their_own(dataset: Path, tmp_path: Path) -> None:
    manifest = read_manifest(dataset)
    index = tmp_path / "index"
    index.mkdir()
    shards = []
    for entry in manifest.shards:
        path = dataset / entry.file
        update = {"file": str(path), "modified_ns": path.stat().st_mtime_ns, "structure_hash": None}
        shards.append(entry.model_copy(update=update))
    write_manifest(manifest.model_copy(update={"indexed": True, "shards": tuple(shards)}), directory=index)
    with StagedDataset.open(Dataset.open(index), directory=tmp_path / "local", max_bytes=LARGE) as staged:
        assert staged.wait_until_staged(timeout_s=300) == 1
        assert (staged.folder / "0000003-shard-00003.h5").exists()
        assert staged.place_of(shards[3]) == staged.folder / "0000003-shard-00003.h5"
        rows = np.arange(NUM_SAMPLES)[::-1]
        assert np.array_equal(staged.gather(rows)["label"], rows)
        assert staged.staged_samples == NUM_SAMPLES
    assert staged.place_of(shards[3]) == dataset / "shard-00003.h5"


def test_places_that_cannot_be_used_are_refused(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be staged below .*file"):
        StagedDataset.open(Dataset.open(dataset), directory=tmp_path / "file", max_bytes=LARGE)
    with pytest.raises(RecipeError, match="max_bytes for staging is 0 bytes"):
        StagedDataset.open(Dataset.open(dataset), directory=tmp_path / "local", max_bytes=0)


def test_files_beyond_the_bound_are_read_where_they_are(dataset: Path, tmp_path: Path) -> None:
    with StagedDataset.open(Dataset.open(dataset), directory=tmp_path / "local", max_bytes=1000) as staged:
        wait_for(lambda: len(staged.problems) == 6)
        assert "more than the bound of 1000" in staged.problems["shard-00000.h5"]
        assert np.array_equal(staged.gather(np.arange(50))["label"], np.arange(50))
        assert (staged.staged_samples, staged.read_samples) == (0, 50)


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = REPOSITORY / "docs" / "guides" / "data-locality.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(guide), "exec"), names)


def test_decoded_values_are_the_same_from_copies(tmp_path: Path) -> None:
    path = tmp_path / "a.nc"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(30, dtype=np.int16)
        file["x"].attrs["scale_factor"], file["x"].attrs["_FillValue"] = 0.5, np.int16(7)
    index_files(tmp_path / "data", files=[str(path)], fields="x:cf=/x")
    original = Dataset.open(tmp_path / "data")
    wanted = np.where(np.arange(30) == 7, np.nan, np.arange(30) * 0.5)
    staged = StagedDataset.open(original, directory=tmp_path, max_bytes=LARGE)
    try:
        assert staged.wait_until_staged(timeout_s=300) == 1
        np.testing.assert_array_equal(staged.gather(np.arange(30))["x"], wanted)
        assert staged.fields == original.fields
    finally:
        staged.close()
