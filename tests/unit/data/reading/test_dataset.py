from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpctrain.data import Dataset, Verify, pack_arrays, pack_tokens, read_manifest, verify_dataset
from hpctrain.data.format.manifest import _checksum
from hpctrain.data.indexing.index_files import index_files
from hpctrain.data.reading.field_reader import OpenFile, ReadTask
from hpctrain.errors import DataError, ExitCode
from tests.unit.data.reading.reading_cases import NUM_SAMPLES, arrays


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack_arrays(tmp_path / "data", arrays(), shard_samples=15, block_bytes=1000)
    return tmp_path / "data"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    pack_arrays(directory, arrays(), shard_samples=15)
    return directory


@given(st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=60))
def test_gather_equals_what_h5py_reads(shared: Path, indices: list[int]) -> None:
    dataset = Dataset.open(shared)
    found = dataset.gather(np.array(indices, dtype=np.int64))
    whole: dict[str, np.ndarray] = {}
    for name in dataset.fields:
        parts = []
        for shard in dataset.manifest.shards:
            with h5py.File(shared / shard.file) as file:
                parts.append(file[name][:])
        whole[name] = np.concatenate(parts)
    for name, array in found.items():
        assert array.shape == (len(indices), *dataset.fields[name].shape)
        assert np.array_equal(array, whole[name][indices])


def test_gather_fills_the_arrays_it_is_given(shared: Path) -> None:
    dataset = Dataset.open(shared)
    out = {"small": np.full((4, 3), -1, np.float32), "large": np.full((4, 40, 32), -1, np.int32)}
    found = dataset.gather(np.array([99, 0, 50, 50]), out=out)
    assert found["small"] is out["small"]
    assert found["large"] is out["large"]
    assert np.array_equal(out["small"], arrays()["small"][[99, 0, 50, 50]])
    assert np.array_equal(out["large"], arrays()["large"][[99, 0, 50, 50]])


def repack(directory: Path, *options: str) -> None:
    for path in sorted(directory.glob("shard-*.h5")):
        target = path.with_suffix(".new")
        subprocess.run(["h5repack", *options, str(path), str(target)], check=True, timeout=300)
        target.rename(path)


@pytest.mark.skipif(shutil.which("h5repack") is None, reason="h5repack is not installed")
@pytest.mark.parametrize("options", [("-f", "GZIP=4"), ("-l", "CONTI"), ("-f", "SHUF", "-f", "GZIP=1")])
def test_shards_repacked_by_h5repack_are_read_and_verified(packed: Path, options: tuple[str, ...]) -> None:
    repack(packed, *options)
    indices = np.array([0, 14, 15, 99, 42, 42])
    found = Dataset.open(packed).gather(indices)
    for name, array in arrays().items():
        assert np.array_equal(found[name], array[indices])
    assert verify_dataset(packed) == []


@pytest.mark.skipif(shutil.which("h5repack") is None, reason="h5repack is not installed")
def test_a_repacked_token_stream_has_the_same_windows(tmp_path: Path) -> None:
    stream = np.random.default_rng(0).integers(0, 255, 3000).astype(np.uint8)
    pack_tokens(tmp_path, [stream], window=16, stride=5, shard_bytes=700)
    before = Dataset.open(tmp_path).gather(np.arange(500))["tokens"]
    repack(tmp_path, "-f", "GZIP=4")
    assert np.array_equal(Dataset.open(tmp_path).gather(np.arange(500))["tokens"], before)
    assert verify_dataset(tmp_path) == []


def test_shards_rewritten_big_endian_are_read_and_verified(packed: Path) -> None:
    for path in packed.glob("shard-*.h5"):
        with h5py.File(path) as file:
            content = {name: file[name][:] for name in file}
        with h5py.File(path, "w") as file:
            for name, array in content.items():
                file.create_dataset(name, data=array.astype(array.dtype.newbyteorder(">")))
    indices = np.array([99, 3, 3, 61])
    found = Dataset.open(packed).gather(indices)
    for name, array in arrays().items():
        assert found[name].dtype.isnative
        assert np.array_equal(found[name], array[indices])
    assert verify_dataset(packed) == []


def test_a_shard_cut_short_after_opening_is_an_error_not_a_bus_error(packed: Path) -> None:
    dataset = Dataset.open(packed)
    dataset.gather(np.arange(NUM_SAMPLES))
    os.truncate(packed / "shard-00003.h5", 5000)
    assert np.array_equal(dataset.gather(np.array([1]))["label"], [1])
    with pytest.raises(DataError, match=r"shard-00003.h5 is cut short: 5000 bytes"):
        dataset.gather(np.array([1, 50]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads: that is what is tested
def test_a_forked_child_reads_for_itself(packed: Path) -> None:
    repack(packed, "-f", "GZIP=1")  # an h5py handle that is inherited gives wrong data
    dataset = Dataset.open(packed)
    dataset.gather(np.array([5]))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            labels = dataset.gather(np.array([7, 93]))["label"].tolist()
            os.write(write_end, json.dumps(labels).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert json.loads(pipe.read()) == [7, 93]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dataset.gather(np.array([8]))["label"].tolist() == [8]


def test_threads_read_at_the_same_time_with_few_shards_open(packed: Path) -> None:
    dataset = Dataset.open(packed)
    dataset._max_open = 2
    errors: list[str] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(100):
            indices = random.integers(0, NUM_SAMPLES, 20)
            if not np.array_equal(dataset.gather(indices)["large"], large[indices]):
                errors.append("differs")

    large = arrays()["large"]
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(dataset._open) <= 2


def test_a_pickled_dataset_opens_its_files_again(packed: Path) -> None:
    import pickle

    dataset = Dataset.open(packed)
    dataset.gather(np.array([0]))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.gather(np.array([3]))["label"].tolist() == [3]


def test_an_index_outside_the_dataset_is_refused(shared: Path) -> None:
    with pytest.raises(
        DataError, match=r"samples 3 to 100 were requested from .*, which has samples 0 to 99"
    ):
        Dataset.open(shared).gather(np.array([3, 100]))
    with pytest.raises(DataError, match="samples -1 to 3 were requested"):
        Dataset.open(shared).gather(np.array([3, -1]))


def edit(directory: Path, change: Callable[[dict[str, Any]], None], *, checksum: bool = True) -> None:
    """Change the manifest; `checksum`: as someone would who also makes it fit."""
    path = directory / "manifest.json"
    document = json.loads(path.read_text())
    kept = document.pop("checksum")
    change(document)
    document["checksum"] = _checksum(document) if checksum else kept
    path.write_text(json.dumps(document))


def replace_field(directory: Path, name: str, array: np.ndarray | None) -> None:
    with h5py.File(directory / "shard-00002.h5", "a") as file:
        del file[name]
        if array is not None:
            file.create_dataset(name, data=array)
    lengthen(directory / "shard-00002.h5")


def link_elsewhere(directory: Path) -> None:
    with h5py.File(directory / "shard-00002.h5", "a") as file:
        del file["label"]
        file["label"] = h5py.ExternalLink("/etc/passwd", "/label")
    lengthen(directory / "shard-00002.h5")


def damage_headers(directory: Path) -> None:
    with (directory / "shard-00002.h5").open("r+b") as file:
        file.write(b"\x89HDG")


def lengthen(path: Path) -> None:
    """Other headers in a file of the same size are damage, whatever they say."""
    with path.open("ab") as file:
        file.write(bytes(8))


def shard_2(document: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = document["shards"][2]
    return shard


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory missing": (shutil.rmtree, "no dataset at .*: there is no such directory"),
    "manifest missing": (
        lambda d: (d / "manifest.json").unlink(),
        "unfinished: shards, but no manifest.json",
    ),
    "manifest is a directory": (
        lambda d: ((d / "manifest.json").unlink(), (d / "manifest.json").mkdir()),
        "cannot be read",
    ),
    "manifest cut": (lambda d: os.truncate(d / "manifest.json", 300), "is not JSON"),
    "manifest binary": (lambda d: (d / "manifest.json").write_bytes(b"\x80\xff" * 9), "cannot be read"),
    "manifest of something else": (
        lambda d: (d / "manifest.json").write_text('{"name": "app"}'),
        "is not an hpctrain manifest: it has no version",
    ),
    "newer version": (
        lambda d: edit(d, lambda m: m.update(version=4)),
        "is of version 4, this hpctrain reads up to 3: update hpctrain",
    ),
    "manifest edited": (
        lambda d: edit(d, lambda m: m["attributes"].update(x=1), checksum=False),
        "was changed since it was written",
    ),
    "unknown key": (lambda d: edit(d, lambda m: m.update(colour="red")), "not valid, at colour"),
    "shards disagree on fields": (
        lambda d: edit(d, lambda m: shard_2(m)["fields"].pop("label")),
        "shard shard-00002.h5 has fields large, small; the dataset has label, large, small",
    ),
    "counts disagree": (lambda d: edit(d, lambda m: m.update(samples=7)), "7 samples in all, but the shards"),
    "shard outside the directory": (
        lambda d: edit(d, lambda m: shard_2(m).update(file="../../etc/passwd")),
        "is not a plain file name",
    ),
    "shard missing": (
        lambda d: (d / "shard-00002.h5").unlink(),
        r"shard shard-00002.h5 of .* is missing \(the manifest lists 7 shards\)",
    ),
    "shard cut short": (
        lambda d: os.truncate(d / "shard-00002.h5", 60_000),
        r"shard-00002.h5 is cut short: 60000 bytes, the manifest says \d+ \(15 samples\)",
    ),
    "shard empty": (lambda d: os.truncate(d / "shard-00002.h5", 0), "is cut short: 0 bytes"),
    "shard overwritten": (
        lambda d: (d / "shard-00002.h5").write_bytes(b"\0" * 200_000),
        "cannot be opened as HDF5",
    ),
    "headers damaged": (
        damage_headers,
        r"shard-00002.h5: the HDF5 headers differ from what was written: restore it or pack again",
    ),
    "dtype differs": (
        lambda d: replace_field(d, "label", np.zeros(15, np.float64)),
        r"field 'label' of shard .*shard-00002.h5 is float64 \(15,\), the manifest says int64 \(15,\)",
    ),
    "shape differs": (
        lambda d: replace_field(d, "small", np.zeros((15, 4), np.float32)),
        r"is float32 \(15, 4\)",
    ),
    "fewer samples": (lambda d: replace_field(d, "label", np.zeros(14, np.int64)), r"is int64 \(14,\)"),
    "field missing": (lambda d: replace_field(d, "label", None), "has no dataset 'label'"),
    "link to elsewhere": (link_elsewhere, "is a soft or external link"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_dataset_is_refused_when_it_is_opened(packed: Path, name: str) -> None:
    spoil, message = BAD[name]
    spoil(packed)
    with pytest.raises(DataError, match=message) as caught:
        Dataset.open(packed)
    assert caught.value.exit_code is ExitCode.DATA


def test_the_directory_above_datasets_names_them(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pack_arrays(tmp_path / part, {"x": np.zeros(3)})
    with pytest.raises(DataError, match="datasets below it: name one of test, train"):
        Dataset.open(tmp_path)


def test_without_checks_at_opening_a_bad_shard_is_refused_when_it_is_read(packed: Path) -> None:
    (packed / "shard-00002.h5").unlink()
    dataset = Dataset.open(packed, verify=Verify.OFF)
    assert dataset.gather(np.array([0]))["label"].tolist() == [0]
    with pytest.raises(DataError, match=r"shard-00002.h5 of .* is missing"):
        dataset.gather(np.array([31]))


def test_a_manifest_survives_being_written_and_read(packed: Path) -> None:
    manifest = read_manifest(packed)
    assert type(manifest).model_validate_json(manifest.model_dump_json()) == manifest


@pytest.mark.parametrize("stored", ["contiguous", "chunked"])
def test_more_files_than_may_be_open_are_read_rightly_whatever_is_opened_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    num_files = 24
    chunks = None if stored == "contiguous" else (1, 70_000)
    for number in range(num_files):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            # Large enough that a gather leaves the reading to tasks.
            file.create_dataset("x", data=np.full((1, 140_000), number, "i4"), chunks=chunks)
    index_files(tmp_path / "index", files=[str(tmp_path)], fields="x=/x")
    dataset = Dataset.open(tmp_path / "index", io="read")
    dataset._max_open = 8
    run, opened = dataset._threads.run, []

    def run_after_others_opened_files(tasks: Sequence[ReadTask]) -> None:
        opened.extend(OpenFile(tmp_path / f"{number:02}.h5") for number in range(num_files))
        run(tasks)

    monkeypatch.setattr(dataset._threads, "run", run_after_others_opened_files)
    try:
        found = dataset.gather(np.arange(num_files))["x"]
    finally:
        for file in opened:
            file.close()
    assert opened  # or nothing was tested
    assert np.array_equal(found[:, [0, -1]], np.repeat(np.arange(num_files), 2).reshape(-1, 2))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_chunks_behind_a_user_block_are_found(tmp_path: Path, compression: str | None) -> None:
    values = np.arange(64, dtype=np.int32).reshape(16, 4)
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file.create_dataset("x", data=values, chunks=(4, 4), compression=compression)
        file.create_dataset("never", shape=(16, 4), dtype="i4", chunks=(4, 4), fillvalue=7)
    index_files(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=/x,never=/never")
    found = Dataset.open(tmp_path / "index").gather(np.arange(16))
    assert np.array_equal(found["x"], values)
    assert np.array_equal(found["never"], np.full((16, 4), 7))
