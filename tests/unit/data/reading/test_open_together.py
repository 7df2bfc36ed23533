"""A dataset that all ranks open together, over threads."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm import World, run_threads
from hpctrain.data import Dataset, Verify, open_together, pack_arrays, read_manifest
from hpctrain.data.format import shard_file as shard_check
from hpctrain.data.reading import dataset as dataset_module, dataset as door
from hpctrain.errors import DataError

NUM_SHARDS = 7


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack_arrays(tmp_path / "data", {"x": np.arange(70.0), "label": np.arange(70)}, shard_samples=10)
    return tmp_path / "data"


def errors_of(packed: Path, *, num_ranks: int, verify: str) -> list[str]:
    def on_rank(world: World) -> str:
        try:
            open_together(world, packed, reads_manifest=world.rank == 0, verify=verify)
        except DataError as error:
            return str(error)
        return ""

    return run_threads(num_ranks, on_rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("verify", ["off", "sizes", "headers"])
def test_every_rank_reads_what_one_process_reads(packed: Path, num_ranks: int, verify: str) -> None:
    expected = Dataset.open(packed).gather(np.arange(70))

    def on_rank(world: World) -> None:
        opened = open_together(world, packed, reads_manifest=world.rank == 0, verify=verify)
        assert opened.manifest == read_manifest(packed)
        found = opened.gather(np.arange(70))
        assert all((found[name] == expected[name]).all() for name in expected)

    run_threads(num_ranks, on_rank)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("verify", ["sizes", "headers"])
def test_each_shard_is_checked_once_and_each_manifest_read_once_per_node(
    packed: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, verify: str
) -> None:
    checked: Counter[str] = Counter()
    by_thread: dict[int, list[str]] = {}
    reads: list[Path] = []

    def counted(check):  # type: ignore[no-untyped-def]
        def run(directory, *, manifest, entry, path=None):  # type: ignore[no-untyped-def]
            checked[entry.file] += 1
            by_thread.setdefault(threading.get_ident(), []).append(entry.file)
            return check(directory, manifest=manifest, entry=entry)

        return run

    def read(directory: Path):  # type: ignore[no-untyped-def]
        reads.append(directory)
        return read_manifest(directory)

    monkeypatch.setattr(dataset_module, "check_shard", counted(shard_check.check_shard))
    monkeypatch.setattr(dataset_module, "check_shard_size", counted(shard_check.check_shard_size))
    monkeypatch.setattr(door, "read_manifest", read)
    run_threads(
        num_ranks,
        lambda world: open_together(world, packed, reads_manifest=world.rank % 4 == 0, verify=verify),
    )
    assert checked == {shard.file: 1 for shard in read_manifest(packed).shards}
    assert max(map(len, by_thread.values())) == -(-NUM_SHARDS // num_ranks)
    assert len(reads) == -(-num_ranks // 4)


@pytest.mark.parametrize("verify", ["sizes", "headers"])
@pytest.mark.parametrize("spoil", ["missing", "cut short"])
def test_a_bad_shard_is_named_on_all_ranks_by_whichever_rank_finds_it(
    packed: Path, verify: str, spoil: str
) -> None:
    shard = packed / "shard-00004.h5"
    if spoil == "missing":
        shard.unlink()
    else:
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size - 8)
    texts = errors_of(packed, num_ranks=3, verify=verify)
    assert len(set(texts)) == 1
    assert "rank 1 (" in texts[0]
    assert "shard-00004.h5" in texts[0]
    assert spoil in texts[0]
    assert errors_of(packed, num_ranks=3, verify="off") == [""] * 3


def test_damaged_headers_are_found_at_once_or_when_the_shard_is_first_read(packed: Path) -> None:
    shard = packed / "shard-00004.h5"
    content = bytearray(shard.read_bytes())
    content[20] ^= 0xFF
    shard.write_bytes(content)
    assert "shard-00004.h5: the HDF5 headers differ" in errors_of(packed, num_ranks=2, verify="headers")[0]
    assert errors_of(packed, num_ranks=2, verify="sizes") == ["", ""]
    opened = Dataset.open(packed, verify=Verify.SIZES)
    opened.gather(np.arange(40))
    with pytest.raises(DataError, match=r"shard-00004.h5: the HDF5 headers differ"):
        opened.gather(np.array([45]))


def test_a_node_that_sees_another_dataset_is_named(packed: Path, tmp_path: Path) -> None:
    pack_arrays(tmp_path / "old", {"x": np.zeros(70), "label": np.arange(70)}, shard_samples=10)

    def on_rank(world: World) -> str:
        try:
            open_together(world, packed if world.rank < 2 else tmp_path / "old", reads_manifest=True)
        except DataError as error:
            return str(error)
        return "no error"

    for text in run_threads(3, on_rank):
        assert "must be the same on every rank: ranks 0-1" in text
        assert "but rank 2" in text
