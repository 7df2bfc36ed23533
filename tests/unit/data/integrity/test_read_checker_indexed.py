"""Damage in files of others: compressed, one sample per file, groups, big-endian, windows that end at documents."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data import Dataset, read_manifest, verify_dataset
from hpctrain.data.indexing.index_files import IndexReading, TokenRequest, index_files
from hpctrain.data.indexing.request import SampleIs
from hpctrain.data.integrity.read_checker import DamagedData, check_while_reading
from hpctrain.errors import DataError
from tests.unit.data.integrity.test_verify import flip_bit

IMAGES = np.random.default_rng(3).normal(size=(24, 9, 7)).astype(np.float32)
BLOCK_BYTES = 1024  # 4.06 images


def index(where: Path, fields: str, **options: Any) -> Dataset:
    """An index of where/*.h5 with hashes, that checks what it reads."""
    index_files(
        where / "index", files=[str(where / "*.h5")], fields=fields, reading=IndexReading.CONTENT,
        block_bytes=BLOCK_BYTES, **options,
    )  # fmt: skip
    return open_checked(where)


def open_checked(where: Path) -> Dataset:
    dataset = Dataset.open(where / "index")
    check_while_reading(dataset, mode="first-epoch")
    return dataset


def change(path: Path, name: str, *, at: tuple[int, ...], value: float) -> None:
    """Change one element of a dataset, and make the file look as it did."""
    before = path.stat()
    changed = path.with_suffix(".changed")
    shutil.copy(path, changed)
    with h5py.File(changed, "r+") as file:
        file[name][at] = value
    assert changed.stat().st_size == before.st_size  # another size would be seen without hashes
    path.write_bytes(changed.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def damaged(dataset: Dataset) -> list[int]:
    """Samples that cannot be read, one by one; `sound` and `verify_dataset` say the same."""
    assert dataset.checker is not None
    bad = []
    for sample in range(dataset.num_samples):
        try:
            dataset.gather(np.array([sample]))
        except DamagedData:
            bad.append(sample)
    sound = dataset.checker.sound(np.arange(dataset.num_samples))
    assert np.flatnonzero(~sound).tolist() == bad
    starts = np.concatenate([[0], np.cumsum([shard.samples for shard in dataset.manifest.shards])])
    names = [shard.file for shard in dataset.manifest.shards]
    reported = set()
    for found in verify_dataset(dataset.directory):
        first = starts[names.index(found.shard)]
        reported |= set(range(first + found.first_sample, first + found.last_sample + 1))
    assert sorted(reported) == bad
    return bad


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (5, 9, 7)}, {"chunks": (4, 9, 4), "shuffle": True}, {"dtype": ">f4"}],
    ids=["contiguous", "chunked", "shuffled-bytes", "big-endian"],
)
def test_a_changed_element_damages_the_samples_of_its_block(options: dict[str, Any], tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"f{number}.h5", "w") as file:
            file.create_dataset("images", data=IMAGES[12 * number : 12 * number + 12], **options)
    assert damaged(index(tmp_path, "x=/images")) == []
    change(tmp_path / "f1.h5", "images", at=(6, 1, 1), value=0.5)
    # Byte 6 * 252 + 32: block 1, bytes 1024 to 2047, samples 4 to 8.
    assert damaged(open_checked(tmp_path)) == [12 + sample for sample in range(4, 9)]


def test_a_flipped_bit_in_a_compressed_chunk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("images", data=IMAGES, chunks=(6, 9, 7), compression="gzip")
        place = data.id.get_chunk_info_by_coord((6, 0, 0))
    index(tmp_path, "x=/images")
    before = path.stat()
    flip_bit(path, offset=place.byte_offset + place.size // 2, bit=3)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    bad = damaged(open_checked(tmp_path))
    assert set(range(6, 12)) <= set(bad) <= set(range(4, 17))  # of the blocks that the chunk reaches into


def test_one_sample_a_file_and_a_group_are_checked_alone(tmp_path: Path) -> None:
    for number in range(4):
        with h5py.File(tmp_path / f"f{number}.h5", "w") as file:
            file["image"] = IMAGES[number]
            file["label"] = np.float64(number)
    assert damaged(index(tmp_path, "x=/image,y=/label", samples=SampleIs.FILE)) == []
    change(tmp_path / "f2.h5", "label", at=(), value=7)
    assert damaged(open_checked(tmp_path)) == [2]

    groups = tmp_path / "groups"
    groups.mkdir()
    with h5py.File(groups / "g.h5", "w") as file:
        for number in range(4):
            file[f"g{number}/image"] = IMAGES[number]
    dataset = index(groups, "x=/*/image", samples=SampleIs.GROUPS)
    change(groups / "g.h5", "g1/image", at=(8, 6), value=9)
    with pytest.raises(DamagedData, match="field 'x', samples 0 to 0"):
        dataset.gather(np.array([1]))
    dataset.gather(np.array([0, 2, 3]))


def test_windows_that_end_at_documents_are_damaged_where_they_hold_the_block(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 4000).astype(np.int32)
    documents = np.array([0, 300, 310, 1500, 1600, 3999])
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["tokens"], file["documents"] = tokens, documents
    request = TokenRequest(window=20, stride=15, documents="/documents")
    dataset = index(tmp_path, "tokens=/tokens", tokens=request)
    assert damaged(dataset) == []
    change(tmp_path / "t.h5", "tokens", at=(1300,), value=1000)  # block 5: tokens 1280 to 1535
    starts = np.load(tmp_path / "index" / "windows.npy")
    expected = [n for n, start in enumerate(starts) if start <= 1535 and start + 20 >= 1280]
    assert damaged(open_checked(tmp_path)) == expected != []


def test_an_index_without_hashes_cannot_be_checked(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = IMAGES
    index_files(tmp_path / "index", files=[str(tmp_path / "f.h5")], fields="x=/images")
    with pytest.raises(DataError, match="has no hashes, so it cannot be checked"):
        open_checked(tmp_path)
    assert verify_dataset(tmp_path / "index") == []


def test_strings_have_no_hashes_and_are_read_as_they_are(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = IMAGES
        file["labels"] = np.array([b"cat", b"dog"] * 12)
    assert damaged(index(tmp_path, "x=/images,y=/labels")) == []
    assert read_manifest(tmp_path / "index").shards[0].fields["y"].hashes == ()
