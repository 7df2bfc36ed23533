"""Damage that is there, or comes, while a dataset is read: found, named, and left out where that is asked for."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.data import (
    Dataset,
    read_manifest,
    verify_dataset,
)
from hpctrain.data.integrity.read_checker import CheckMode, DamagedData, make_checker
from hpctrain.errors import DataError
from tests.unit.data.integrity.damaged_datasets import (
    BLOCK_BYTES,
    IMAGE_BYTES,
    SAMPLES,
    SHARD_SAMPLES,
    flip_in,
    open_checked,
)
from tests.unit.data.integrity.test_verify import flip_bit


def read_epoch(dataset: Dataset, random: np.random.Generator) -> NDArray[Any]:
    """Every sample once, shuffled, in batches of 16; the first field, in the order of the samples."""
    name, spec = next(iter(dataset.fields.items()))
    found = np.empty((dataset.num_samples, *spec.shape), spec.dtype)
    for batch in np.array_split(random.permutation(dataset.num_samples), dataset.num_samples // 16):
        found[batch] = dataset.gather(batch)[name]
    return found


def damage(path: Path, random: np.random.Generator) -> None:
    """A random bit flipped, or the file cut at a random place."""
    size = path.stat().st_size
    if random.random() < 0.25:
        os.truncate(path, int(random.integers(size)))
    else:
        flip_bit(path, offset=int(random.integers(size)), bit=int(random.integers(8)))


def test_500_damages_at_random_places_are_all_noticed(originals: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(11)
    where = Path(shutil.copytree(originals, tmp_path / "data"))
    whole = {path: path.read_bytes() for path in sorted(where.glob("*/*.h5"))}
    content = {path.parent: read_epoch(Dataset.open(path.parent), random) for path in whole}
    paths = list(whole)
    unnoticed = []
    harmless = 0
    for trial in range(500):
        path = paths[random.integers(len(paths))]
        dataset = None
        if trial % 2:  # it comes in mid-epoch, before or after the damaged shard was first read
            dataset = open_checked(path.parent, CheckMode.ALWAYS)
            dataset.gather(random.integers(dataset.num_samples, size=2))
        damage(path, random)
        error, found = "", None
        try:
            if dataset is None:
                dataset = open_checked(path.parent, list(CheckMode)[1 + trial % 4 // 2])
            found = read_epoch(dataset, random)
        except DataError as caught:
            error = str(caught)  # the exception itself would keep the files open
        # Bytes beside the chunks of a compressed shard are left to `verify_dataset`: what is read is right.
        if found is not None and path.parent.name == "compressed":
            harmless += 1
            np.testing.assert_array_equal(found, content[path.parent])
            error = " ".join(damage.describe() for damage in verify_dataset(path.parent))
        if path.name not in error:
            unnoticed.append((trial, path.name, error))
        path.write_bytes(whole[path])
    assert unnoticed == []
    assert harmless < 100


def test_a_whole_dataset_is_read_as_without_checks(images: Path) -> None:
    for mode in CheckMode:
        dataset = open_checked(images, mode)
        indices = np.random.default_rng(0).permutation(SAMPLES)
        for _ in range(2):
            assert dataset.gather(indices)["label"].tolist() == indices.tolist()
        assert dataset.checker is None or dataset.checker.damages == []


def test_damage_names_shard_field_and_samples(images: Path) -> None:
    flip_in(images, "image", shard=1, byte=IMAGE_BYTES * 9)
    dataset = open_checked(images)
    dataset.gather(np.arange(SHARD_SAMPLES + 8))  # the shard's samples 0 to 7: other blocks
    message = r"shard-00001.h5, field 'image', samples 8 to 11: the content differs"
    with pytest.raises(DamagedData, match=message) as caught:
        dataset.gather(np.array([3, SHARD_SAMPLES + 11]))
    assert (caught.value.damage.first_sample, caught.value.damage.last_sample) == (8, 11)
    assert caught.value.exit_code == 3
    dataset.gather(np.array([3, SHARD_SAMPLES + 12]))


@pytest.mark.parametrize("mode", [CheckMode.FIRST_EPOCH, CheckMode.ALWAYS])
def test_each_block_is_hashed_once_or_always(images: Path, mode: CheckMode) -> None:
    dataset = open_checked(images, mode)
    dataset.gather(np.arange(SAMPLES))
    flip_in(images, "label", shard=2, byte=0)
    if mode is CheckMode.FIRST_EPOCH:
        assert dataset.gather(np.array([70]))["label"] != 70  # what this mode does not see
    else:
        with pytest.raises(DamagedData, match="field 'label', samples 0 to 19"):
            dataset.gather(np.array([70]))


@pytest.mark.parametrize(("field", "byte"), [("image", 0), ("image", 4 * IMAGE_BYTES - 1), ("label", 8 * 30)])
def test_the_sound_samples_are_those_that_touch_no_damaged_block(images: Path, field: str, byte: int) -> None:
    flip_in(images, field, shard=0, byte=byte)
    dataset = open_checked(images)
    assert dataset.checker is not None
    order = np.random.default_rng(3).permutation(SAMPLES)
    bad = range(4) if field == "image" else range(SHARD_SAMPLES)
    sound = dataset.checker.sound(order)
    assert order[~sound].tolist() == [sample for sample in order if sample in bad]
    assert dataset.gather(order[sound])["label"].tolist() == order[sound].tolist()
    (found,) = dataset.checker.damages
    assert (found.shard, found.field) == ("shard-00000.h5", field)


def test_windows_of_tokens_that_hold_a_damaged_block_are_not_sound(tokens: Path) -> None:
    block_tokens = BLOCK_BYTES // 2
    samples = read_manifest(tokens).shards[0].samples
    for token in (0, 511, 512, 3000):
        flip_in(tokens, "tokens", shard=0, byte=2 * token)
        dataset = open_checked(tokens)
        assert dataset.checker is not None
        sound = dataset.checker.sound(np.arange(dataset.num_samples))
        block = set(range(token // block_tokens * block_tokens, (token // block_tokens + 1) * block_tokens))
        bad = [sample for sample in range(samples) if block & set(range(20 * sample, 20 * sample + 33))]
        assert np.flatnonzero(~sound).tolist() == bad
        flip_in(tokens, "tokens", shard=0, byte=2 * token)


def test_a_shard_cut_short_or_gone_is_not_skipped(images: Path) -> None:
    dataset = open_checked(images)
    other = open_checked(images)
    assert dataset.checker is not None
    assert other.checker is not None
    os.truncate(images / "shard-00002.h5", 3000)
    with pytest.raises(DataError, match=r"shard-00002.h5 is cut short"):
        dataset.checker.sound(np.arange(SAMPLES))
    (images / "shard-00000.h5").unlink()
    with pytest.raises(DataError, match=r"shard-00000.h5 .* is missing"):
        other.checker.sound(np.arange(SAMPLES))


def test_damaged_headers_concern_the_whole_shard(images: Path) -> None:
    path = images / "shard-00001.h5"
    with path.open("ab") as file:
        file.write(b"more")
    dataset = open_checked(images)
    dataset.gather(np.arange(SHARD_SAMPLES))
    with pytest.raises(
        DamagedData, match=r"shard-00001.h5, the whole shard, samples 0 to 34: the HDF5 headers"
    ):
        dataset.gather(np.array([40]))


def test_re_packed_shards_are_checked_by_their_content(images: Path) -> None:
    path = images / "shard-00001.h5"
    with h5py.File(path) as file:
        found = {name: file[name][()] for name in ("image", "label")}
    found["image"][9, 3, 3] ^= 1
    path.unlink()
    with h5py.File(path, "w") as file:
        file.create_dataset("image", data=found["image"], chunks=(5, 16, 16), compression="gzip")
        file.create_dataset("label", data=found["label"].astype(">i8"))
    dataset = open_checked(images)
    assert dataset.checker is not None
    sound = dataset.checker.sound(np.arange(SAMPLES))
    assert np.flatnonzero(~sound).tolist() == [SHARD_SAMPLES + sample for sample in range(8, 12)]


def test_threads_that_read_together_all_meet_the_damage(images: Path) -> None:
    flip_in(images, "image", shard=0, byte=0)
    dataset = open_checked(images)
    assert dataset.checker is not None
    met: list[str] = []

    def read() -> None:
        try:
            dataset.gather(np.arange(SAMPLES))
        except DamagedData as error:
            met.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(met) == 6
    assert len(set(met)) == 1
    assert len(dataset.checker.damages) == 1


def test_data_without_hashes_cannot_be_checked(images: Path) -> None:
    manifest = read_manifest(images)
    document = manifest.model_dump(mode="json")
    document["shards"][1]["fields"]["label"]["hashes"] = []
    unhashed = type(manifest).model_validate(document)
    with pytest.raises(DataError, match=r"field 'label' of shard shard-00001.h5 .* has no hashes"):
        make_checker(images, unhashed, mode="always")
    assert make_checker(images, unhashed, mode="off") is None


def test_a_copy_elsewhere_is_what_is_checked(images: Path, tmp_path: Path) -> None:
    copies = Path(shutil.copytree(images, tmp_path / "copies"))
    flip_in(copies, "label", shard=0, byte=0)

    class Copies:
        def path(self, shard_index: int) -> Path | None:
            return copies / "shard-00000.h5" if shard_index == 0 else None

    dataset = open_checked(images)
    dataset.locator = Copies()
    dataset.gather(np.arange(SHARD_SAMPLES, SAMPLES))
    with pytest.raises(DamagedData, match=r"shard-00000.h5, field 'label'"):
        dataset.gather(np.array([0]))


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = Path(__file__).resolve().parents[4] / "docs" / "guides" / "data-integrity.md"
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(guide), "exec"), names)
    assert isinstance(names["skipped"], int)
