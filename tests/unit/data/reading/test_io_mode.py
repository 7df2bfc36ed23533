"""Reading by map and by preadv is the same; what goes wrong in the filesystem is said in words."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpctrain.data import Dataset, Loader, pack_arrays, pack_tokens
from hpctrain.data.format.manifest import Manifest, read_manifest, write_manifest
from hpctrain.data.format.shard_file import check_shard
from hpctrain.data.reading.open_shard import IoMode, choose
from hpctrain.errors import DataError, ExitCode
from hpctrain.storage import Filesystem
from tests.unit.data.reading.reading_cases import NUM_SAMPLES, arrays


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack_arrays(tmp_path / "data", arrays(), shard_samples=15)
    return tmp_path / "data"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    pack_arrays(directory / "samples", arrays(), shard_samples=40)
    stream = np.random.default_rng(0).integers(0, 255, 9000).astype(np.uint16)
    pack_tokens(directory / "tokens", [stream], window=64, stride=20, dtype="uint16", shard_bytes=6000)
    return directory


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=60))
def test_reading_gives_what_the_map_gives(shared: Path, indices: list[int]) -> None:
    for part in ("samples", "tokens"):
        mapped, read = (Dataset.open(shared / part, verify="off", io=io) for io in ("map", "read"))
        wanted = np.array(indices, dtype=np.int64)
        out = {"small": np.zeros((2 * len(wanted), 3), np.float32)[::2]}  # not contiguous
        found = read.gather(wanted, out=out if part == "samples" else None)
        for name, array in mapped.gather(wanted).items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype.isnative
        if part == "samples":
            assert found["small"] is out["small"]
            assert np.array_equal(found["large"], arrays()["large"][wanted])


def test_big_endian_shards_are_read_in_both_ways(packed: Path) -> None:
    for path in packed.glob("shard-*.h5"):
        with h5py.File(path) as file:
            content = {name: file[name][:] for name in file}
        with h5py.File(path, "w") as file:
            for name, array in content.items():
                file.create_dataset(name, data=array.astype(array.dtype.newbyteorder(">")))
    indices = np.array([99, 3, 3, 61])
    for io in ("map", "read"):
        found = Dataset.open(packed, io=io).gather(indices)
        for name, array in arrays().items():
            assert np.array_equal(found[name], array[indices])


def counted_preadv(monkeypatch: pytest.MonkeyPatch, most: int = 1 << 40) -> list[int]:
    """Bytes of each preadv from now on; none reads more than `most` bytes at once."""
    real, counts = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        chosen, room = [], most
        for buffer in buffers:
            chosen.append(buffer[:room])
            room -= len(chosen[-1])
            if room == 0:
                break
        counts.append(real(descriptor, chosen, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


def test_neighbours_are_read_with_one_call_wherever_they_go(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.open(packed, io="read")
    counts = counted_preadv(monkeypatch)
    indices = np.array([20, 17, 18, 29, 19])
    found = dataset.gather(indices)
    # large: 17 to 20, and 29; of the small fields everything between them
    assert sorted(counts) == sorted([4 * 5120, 5120, 13 * 12, 13 * 8])
    assert np.array_equal(found["large"], arrays()["large"][indices])
    assert found["label"].tolist() == indices.tolist()


@pytest.mark.parametrize("most", [1, 1000, 5121])
def test_a_filesystem_that_gives_less_than_was_asked_is_asked_again(
    packed: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    dataset = Dataset.open(packed, io="read")
    counted_preadv(monkeypatch, most)
    indices = np.array([3, 4, 5, 50])
    for name, array in dataset.gather(indices).items():
        assert np.array_equal(array, arrays()[name][indices])


def test_an_error_of_the_disk_names_shard_field_and_samples(packed: Path) -> None:
    """The kernel's own EIO: nothing is mapped at the addresses that are read of /proc/self/mem."""
    dataset = Dataset.open(packed, io="read")
    dataset.gather(np.arange(NUM_SAMPLES))
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    shard = dataset._open[2]
    shard._needed_bytes = 0  # the size of /proc/self/mem is 0
    os.dup2(memory, shard._file.descriptor)
    os.close(memory)
    assert dataset.gather(np.array([29]))["label"].tolist() == [29]  # the other shards are read
    message = r"field 'small', samples 1 to 3 of shard .*shard-00002.h5 cannot be read: Input/output error"
    with pytest.raises(DataError, match=message) as caught:
        dataset.gather(np.array([33, 29, 31]))
    assert caught.value.exit_code is ExitCode.DATA


def test_a_shard_cut_under_an_open_reader_is_an_error(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.open(packed, io="read")
    dataset.gather(np.arange(NUM_SAMPLES))
    os.truncate(packed / "shard-00003.h5", 30_000)
    with pytest.raises(DataError, match=r"shard-00003.h5 is cut short: 30000 bytes"):
        dataset.gather(np.array([1, 50]))
    # Cut between the look at its size and the reading:
    monkeypatch.setattr(dataset._open[3], "check_size", lambda: None)
    with pytest.raises(
        DataError, match=r"sample 14 of shard .*shard-00003.h5 cannot be read: the file ends \d+ byt"
    ):
        dataset.gather(np.array([59]))


@pytest.mark.parametrize("io", ["map", "read"])
def test_a_shard_that_disappears_in_mid_epoch_ends_it_in_words(packed: Path, io: str) -> None:
    dataset = Dataset.open(packed, io=io)
    loader = Loader(dataset, global_batch=10, shuffle=False, prefetch_bytes=1)
    with loader.epoch(0) as batches:
        assert next(batches)["label"].tolist() == list(range(10))
        (packed / "shard-00004.h5").unlink()
        labels = [next(batches)["label"].tolist() for _ in range(5)]
        with pytest.raises(DataError, match=r"shard .*shard-00004.h5 is missing, it existed before"):
            next(batches)
    assert labels == [list(range(start, start + 10)) for start in range(10, 60, 10)]


@pytest.mark.parametrize("io", ["map", "read"])
def test_a_shard_that_is_open_outlives_its_name(packed: Path, io: str) -> None:
    dataset = Dataset.open(packed, io=io)
    dataset.gather(np.arange(NUM_SAMPLES))
    for path in packed.glob("shard-*.h5"):
        path.unlink()
    assert np.array_equal(dataset.gather(np.arange(NUM_SAMPLES))["large"], arrays()["large"])


def test_auto_maps_what_fits_and_reads_the_rest(packed: Path) -> None:
    assert Dataset.open(packed).io is IoMode.MAP
    assert Dataset.open(packed, cache_bytes=100_000).io is IoMode.READ
    assert choose(IoMode.MAP, directory=packed, file_bytes=1 << 50, map_bytes=0) is IoMode.MAP
    with pytest.raises(ValueError, match="magic"):
        Dataset.open(packed, io="magic")


def test_a_remote_filesystem_is_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hpctrain.data.reading.open_shard.filesystem_of", lambda path: Filesystem(kind="lustre")
    )
    assert Dataset.open(packed).io is IoMode.READ


def test_reading_takes_no_memory_beyond_the_batch(tmp_path: Path) -> None:
    pack_arrays(tmp_path, {"x": np.zeros((6000, 4000), np.uint8)})
    peaks = {}
    for io in ("read", "map"):
        dataset = Dataset.open(tmp_path, io=io)
        before = mapped_bytes()
        for start in range(0, 6000, 50):
            dataset.gather(np.arange(start, start + 50))
        peaks[io] = mapped_bytes() - before
    assert peaks["read"] < 2 << 20
    assert peaks["map"] > 20 << 20  # the measure works


def mapped_bytes() -> int:
    return (
        int(re.findall(r"^RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[0]) << 10
    )


def as_indexed(directory: Path, target: Path) -> Manifest:
    """The same shards where they are, through an indexed manifest in `target`."""
    target.mkdir()
    document = read_manifest(directory).model_dump(mode="json")
    document["indexed"] = True
    for shard in document["shards"]:
        path = directory / shard["file"]
        shard.update(file=f"../{directory.name}/{shard['file']}", modified_ns=path.stat().st_mtime_ns)
    manifest = Manifest.model_validate(document)
    write_manifest(manifest, directory=target)
    return manifest


def test_an_indexed_file_is_trusted_while_it_is_as_it_was(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = packed.parent / "indexed"
    manifest = as_indexed(packed, indexed)
    dataset = Dataset.open(indexed)
    assert np.array_equal(dataset.gather(np.arange(NUM_SAMPLES))["large"], arrays()["large"])
    with monkeypatch.context() as patched:  # its place is in the manifest: HDF5 is not asked
        patched.setattr("hpctrain.data.hdf5.layout.inspect", None)
        layouts = check_shard(indexed, manifest=manifest, entry=manifest.shards[1])
    assert layouts["large"].shape == (15, 40, 32)
    os.utime(packed / "shard-00001.h5")
    for read in (lambda: dataset.gather(np.array([16])), lambda: Dataset.open(indexed)):
        with pytest.raises(
            DataError, match=r"shard-00001.h5 has changed since it was indexed .*: index the files"
        ):
            read()
    (packed / "shard-00001.h5").unlink()
    with pytest.raises(
        DataError, match=r"shard ../data/shard-00001.h5 of .* is missing .* or index the files again"
    ):
        Dataset.open(indexed)


class Copies:
    """Copies of shards, some of them here already."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.here: set[int] = set()

    def path(self, shard_index: int) -> Path | None:
        return self.directory / f"{shard_index}.h5" if shard_index in self.here else None


@pytest.mark.parametrize("is_indexed", [False, True], ids=["packed", "indexed"])
def test_a_copy_is_read_once_it_is_there(packed: Path, is_indexed: bool) -> None:
    directory = packed
    if is_indexed:
        directory = packed.parent / "indexed"
        as_indexed(packed, directory)
    copies = Copies(packed.parent)
    shutil.copy(packed / "shard-00002.h5", packed.parent / "2.h5")  # of another time than the original
    dataset = Dataset.open(directory, verify="off")
    dataset.locator = copies
    dataset.gather(np.array([0, 31]))
    (packed / "shard-00002.h5").unlink()
    copies.here.add(2)
    dataset.forget(2)
    assert dataset.gather(np.array([31, 44]))["label"].tolist() == [31, 44]
    assert dataset._open[2].path == packed.parent / "2.h5"


def test_the_checker_sees_the_samples_before_they_are_read(packed: Path) -> None:
    class Checker:
        def __init__(self) -> None:
            self.seen: list[tuple[int, str, list[int]]] = []

        def before_read(self, shard_index: int, field_name: str, rows: Any) -> None:
            self.seen.append((shard_index, field_name, rows.tolist()))
            if 7 in rows:
                raise DataError("sample 7 is damaged")

    dataset = Dataset.open(packed)
    dataset.checker = checker = Checker()
    dataset.gather(np.array([16, 1, 15, 1]))
    assert checker.seen == [(s, f, r) for s, r in ((0, [1, 1]), (1, [1, 0])) for f in dataset.fields]
    with pytest.raises(DataError, match="sample 7"):
        dataset.gather(np.array([22]))


def test_large_samples_are_copied_in_threads_to_the_same_result(tmp_path: Path) -> None:
    volumes = np.random.default_rng(0).integers(0, 9, (6, 150, 1000)).astype(np.float32)
    for order in "<>":
        directory = tmp_path / f"order {ord(order)}"
        pack_arrays(directory, {"x": volumes, "label": np.arange(6)}, shard_samples=4)
        for path in directory.glob("shard-*.h5") if order == ">" else ():
            with h5py.File(path) as file:
                content = {name: file[name][:] for name in file}
            with h5py.File(path, "w") as file:
                for name, array in content.items():
                    file[name] = array.astype(array.dtype.newbyteorder(order))
        for io in ("map", "read"):
            dataset = Dataset.open(directory, io=io, decode_threads=3)
            indices = np.array([5, 0, 3, 3, 4])
            assert np.array_equal(dataset.gather(indices)["x"], volumes[indices])
    os.truncate(directory / "shard-00000.h5", 700_000)
    with pytest.raises(DataError, match="cut short"):
        dataset.gather(np.array([5, 2]))
