from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import Damage, pack_arrays, pack_tokens, read_manifest, verify_dataset
from hpctrain.data.integrity.hashed_blocks import find_datasets, merge_damage
from hpctrain.errors import DataError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("data")
    fields = {"image": random.integers(0, 255, (90, 16, 16), dtype=np.uint8), "label": np.arange(90)}
    pack_arrays(directory, fields, shard_samples=35, block_bytes=1024)
    return directory


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def flip_bit(path: Path, *, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def test_a_whole_dataset_has_no_damage(dataset: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert verify_dataset(dataset, progress=lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (90 * (256 + 8), 90 * (256 + 8))


def test_every_flipped_bit_anywhere_in_a_file_is_found(original: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    names = [shard.file for shard in read_manifest(original).shards]
    for trial in range(150):
        dataset = tmp_path / f"trial{trial}"
        shutil.copytree(original, dataset)
        name = names[random.integers(len(names))]
        offset = int(random.integers((dataset / name).stat().st_size))
        flip_bit(dataset / name, offset=offset, bit=int(random.integers(8)))
        damages = verify_dataset(dataset)
        assert [d.shard for d in damages] == [name], (name, offset)
        shutil.rmtree(dataset)


def test_every_flipped_bit_of_the_manifest_is_found_or_changes_nothing(dataset: Path) -> None:
    random = np.random.default_rng(8)
    path = dataset / "manifest.json"
    whole = path.read_bytes()
    before = read_manifest(dataset)
    for _ in range(100):
        offset = int(random.integers(len(whole)))
        path.write_bytes(whole)
        flip_bit(path, offset=offset, bit=int(random.integers(8)))
        try:
            assert read_manifest(dataset) == before
        except DataError:
            continue


def test_every_truncation_is_found(original: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    for trial in range(30):
        dataset = tmp_path / f"trial{trial}"
        shutil.copytree(original, dataset)
        path = dataset / "shard-00001.h5"
        os.truncate(path, int(random.integers(path.stat().st_size)))
        damages = verify_dataset(dataset)
        assert [(d.shard, d.field, d.first_sample, d.last_sample) for d in damages] == [
            ("shard-00001.h5", None, 0, 34)
        ]
        assert "cut short" in damages[0].reason


def test_bytes_added_behind_a_shard_are_found(dataset: Path) -> None:
    with (dataset / "shard-00000.h5").open("ab") as file:
        file.write(b"more")
    assert [d.reason for d in verify_dataset(dataset)] == ["the HDF5 headers differ from what was written"]


def test_damage_names_shard_field_and_samples(dataset: Path) -> None:
    stored = read_manifest(dataset).shards[1].fields["image"]
    # Sample 9 lies in the block of samples 8 to 11.
    flip_bit(dataset / "shard-00001.h5", offset=stored.offset + 256 * 9)
    (dataset / "shard-00002.h5").unlink()
    first, second = verify_dataset(dataset)
    assert first == Damage(
        shard="shard-00001.h5",
        field="image",
        first_sample=8,
        last_sample=11,
        reason="the content differs from its hash",
    )
    assert (second.shard, second.field, second.last_sample) == ("shard-00002.h5", None, 19)
    assert "is missing" in second.reason
    assert first.describe() == (
        "shard-00001.h5, field 'image', samples 8 to 11: the content differs from its hash"
    )


@pytest.mark.parametrize(("window", "stride"), [(10, 10), (10, 3), (4, 9)])
def test_damage_in_a_token_stream_names_every_window_that_holds_it(
    tmp_path: Path, window: int, stride: int
) -> None:
    manifest = pack_tokens(
        tmp_path, [np.arange(500, dtype=np.uint8)], window=window, stride=stride, block_bytes=16
    )
    stored = manifest.shards[0].fields["tokens"]
    for token in (0, 33, 250, stored.num_bytes - 1):
        flip_bit(tmp_path / "shard-00000.h5", offset=stored.offset + token)
        (damage,) = verify_dataset(tmp_path)
        block = range(token // 16 * 16, min(token // 16 * 16 + 16, stored.num_bytes))
        holding = [
            sample
            for sample in range(manifest.samples)
            if set(range(sample * stride, sample * stride + window + 1)) & set(block)
        ]
        assert (damage.first_sample, damage.last_sample) == (holding[0], holding[-1])
        flip_bit(tmp_path / "shard-00000.h5", offset=stored.offset + token)
    assert verify_dataset(tmp_path) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 200])
def test_the_ranks_together_find_what_one_rank_finds(dataset: Path, num_ranks: int) -> None:
    manifest = read_manifest(dataset)
    for shard in (0, 2):
        stored = manifest.shards[shard].fields["image"]
        for byte in (0, 1030, 2050, stored.num_bytes - 1):
            flip_bit(dataset / manifest.shards[shard].file, offset=stored.offset + byte)
    (dataset / "shard-00001.h5").unlink()
    alone = verify_dataset(dataset)
    parts = [verify_dataset(dataset, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert merge_damage([damage for part in parts for damage in part]) == alone
    assert len(alone) == 5


def test_each_byte_is_read_by_one_rank(dataset: Path) -> None:
    blocks: list[list[int]] = [[], [], []]
    for rank in range(3):
        verify_dataset(
            dataset, rank=rank, num_ranks=3, progress=lambda done, _, seen=blocks[rank]: seen.append(done)
        )
    assert sum(seen[-1] for seen in blocks) == 90 * (256 + 8)
    counts = [len(seen) for seen in blocks]
    assert max(counts) - min(counts) <= 1


def test_datasets_are_found_at_a_directory_or_below_it(original: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(original, tmp_path / part)
    assert find_datasets(original) == [original]
    assert find_datasets(tmp_path) == [tmp_path / "test", tmp_path / "train"]
    with pytest.raises(DataError, match="no dataset at"):
        find_datasets(tmp_path / "nothing")
