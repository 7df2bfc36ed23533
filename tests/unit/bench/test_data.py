"""`hpctrain bench data`: what it reads, and what it says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from hpctrain.bench.data.measure import (
    DataAsked,
    Reader,
    batches_to_read,
    data_document,
    data_lines,
    data_table,
    measure_data,
    time_waits,
)
from hpctrain.bench.data.raw_reads import RawReader
from hpctrain.bench.page_cache import Cache, cached_share, evict
from hpctrain.cli.bench.group import bench_app
from hpctrain.data import Dataset, pack_arrays, pack_tokens
from hpctrain.errors import DataError, UsageError

SAMPLES, SHARD = 200, 60
ROW_BYTES = 32 * 32 * 4 + 8


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "packed"
    random = np.random.default_rng(0)
    fields = {
        "image": random.integers(0, 20, (SAMPLES, 32, 32)).astype("float32"),
        "label": np.arange(SAMPLES),
    }
    pack_arrays(directory, fields, shard_samples=SHARD)
    return directory


def repacked(source: Path, directory: Path) -> Path:
    """The same dataset with gzip chunks of 7 samples and half an image, as other HDF5 tools would make it."""
    directory.mkdir()
    for path in source.iterdir():
        if path.suffix != ".h5":
            (directory / path.name).write_bytes(path.read_bytes())
            continue
        with h5py.File(path) as old, h5py.File(directory / path.name, "w") as new:
            new.create_dataset("image", data=old["image"][...], chunks=(7, 16, 32), compression="gzip")
            new.create_dataset("label", data=old["label"][...])
    return directory


def asked(directory: Path, **changes: object) -> DataAsked:
    settings: dict[str, object] = {
        "directory": directory, "batch": 16, "repeats": 2, "step_s": 0.001, "num_steps": 3, **changes,
    }  # fmt: skip
    return DataAsked(**settings)  # type: ignore[arg-type]


def test_every_reader_reads_the_bytes_of_the_same_samples(packed: Path) -> None:
    reported: list[float] = []
    measured = measure_data(asked(packed), progress=reported.append)
    assert [row.reader for row in measured.rows] == list(Reader)
    for row in measured.rows:
        assert (row.num_samples, row.num_batches) == (SAMPLES, 13)
        assert row.num_bytes == SAMPLES * ROW_BYTES
        assert len(row.samples_s) == 2
        assert row.samples_per_s == pytest.approx(SAMPLES / row.seconds.median)
    raw = measured.rows[-1]
    assert raw.share_of_raw == 1.0
    assert measured.rows[0].share_of_raw == pytest.approx(
        raw.seconds.median / measured.rows[0].seconds.median
    )
    assert measured.wait is not None
    assert len(measured.wait.waits_s) == 3
    assert measured.notes == []
    assert reported == sorted(reported)
    assert reported[-1] <= 1


def test_part_of_an_epoch_cold_and_in_order(packed: Path) -> None:
    settings = asked(packed, num_batches=3, cache=Cache.COLD, shuffle=False, num_steps=0, warmup=0)
    measured = measure_data(settings)
    assert {row.num_bytes for row in measured.rows} == {48 * ROW_BYTES}
    assert measured.wait is None
    assert measured.cached is not None


def test_raw_reading_of_chunks_reads_each_chunk_of_a_batch_once(packed: Path, tmp_path: Path) -> None:
    directory = repacked(packed, tmp_path / "gzip")
    dataset = Dataset.open(directory)
    with h5py.File(directory / dataset.manifest.shards[1].file) as file:
        chunks = file["image"]
        sizes = [chunks.id.get_chunk_info_by_coord((row, half, 0)).size for row in (0, 7) for half in (0, 16)]
    indices = SHARD + np.array([3, 0, 3, 13])
    with RawReader(dataset, indices=indices) as raw:
        assert raw.left_out == {}
        assert raw.read(indices) == sum(sizes) + 4 * 8  # the labels are contiguous
        assert raw.read(indices[:2]) == sum(sizes[:2]) + 2 * 8


def test_compressed_data_is_measured_beside_its_stored_bytes(packed: Path, tmp_path: Path) -> None:
    measured = measure_data(asked(repacked(packed, tmp_path / "gzip"), num_steps=0))
    loader, gather, raw = measured.rows
    assert loader.num_bytes == gather.num_bytes == SAMPLES * ROW_BYTES
    assert raw.num_bytes > 0
    assert loader.share_of_raw is not None


def test_windows_of_tokens_are_read_raw_as_they_overlap(tmp_path: Path) -> None:
    pack_tokens(tmp_path / "t", [np.arange(5001) % 251], window=100, stride=50, shard_bytes=2000)
    dataset = Dataset.open(tmp_path / "t")
    indices = np.arange(dataset.num_samples)
    with RawReader(dataset, indices=indices) as raw:
        assert raw.read(indices) == dataset.num_samples * 101
    measured = measure_data(asked(tmp_path / "t", num_steps=0))
    assert measured.rows[-1].num_bytes == dataset.num_samples * 101


def test_how_much_is_read_is_bounded_and_what_an_epoch_lacks_is_refused(packed: Path) -> None:
    assert batches_to_read(asked(packed), num_samples=10**9, sample_bytes=1 << 20) == 16
    assert batches_to_read(asked(packed), num_samples=10**9, sample_bytes=1 << 30) == 8
    assert batches_to_read(asked(packed), num_samples=17, sample_bytes=8) == 2
    with pytest.raises(
        UsageError, match="5 batches of 16 samples were asked for; an epoch of 17 samples has 2"
    ):
        batches_to_read(asked(packed, num_batches=5), num_samples=17, sample_bytes=8)
    with pytest.raises(UsageError, match="repeats is 0"):
        asked(packed, repeats=0)


def test_a_wait_is_that_of_the_steps_behind_the_first() -> None:
    def batches() -> Iterator[int]:
        yield from range(4)

    seen: list[int] = []
    wait = time_waits(batches(), step=seen.append, step_s=0.5, num_steps=10)
    assert seen == [0, 1, 2, 3]
    assert wait is not None
    assert len(wait.waits_s) == 3
    assert wait.share == pytest.approx(sum(wait.waits_s) / 3 / 0.5)
    assert time_waits(iter([1]), step=seen.append, step_s=0.5, num_steps=10) is None


def test_a_file_leaves_the_page_cache_unless_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    before = cached_share([path])
    if before is None:
        pytest.skip("no mincore here")
    assert before == 1.0
    evict([path])
    after = cached_share([path])
    if after == 1.0:
        pytest.skip("this filesystem is in memory")
    assert after == 0.0
    with pytest.raises(DataError, match="gone cannot be dropped"):
        evict([tmp_path / "gone"])


def test_the_command_prints_a_table_and_writes_all_of_it(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "data.json"
    words = [
        "data",
        str(packed),
        "--batch",
        "16",
        "--repeats",
        "2",
        "--step-ms",
        "1",
        "--steps",
        "3",
    ]
    done = CliRunner().invoke(bench_app, [*words, "--json", str(path)])
    assert done.exit_code == 0, done.output
    for found in ("loader", "gather", "raw", "samples/s", "a training step of 1 ms waits"):
        assert found in done.output
    document = json.loads(path.read_text())
    assert document["schema"] == "hpctrain.bench.data/1"
    assert [row["reader"] for row in document["readers"]] == ["loader", "gather", "raw"]
    assert document["dataset"] == {"samples": SAMPLES, "sample_bytes": ROW_BYTES, "shards": 4}
    assert document["settings"]["order"] == "shuffle"
    assert len(document["wait"]["samples_s"]) == 3


def test_what_is_wrong_is_found_before_anything_is_measured(packed: Path, tmp_path: Path) -> None:
    for words, message in (
        ([str(packed), "--order", "random"], "not one of shuffle, sequential"),
        ([str(packed), "--io", "fast"], "not one of auto, map, read"),
        ([str(tmp_path / "nothing")], "no dataset at"),
        ([str(packed), "--json", str(tmp_path)], "is a directory"),
        ([str(packed), "--batches", "1000"], "an epoch of 200 samples has 4"),
    ):
        done = CliRunner().invoke(bench_app, ["data", *words])
        assert done.exit_code != 0
        assert message in f"{done.output} {done.exception}"


def test_the_table_says_where_nothing_could_be_read_raw(packed: Path) -> None:
    from dataclasses import replace

    settings = asked(packed, num_steps=0)
    measured = measure_data(settings)
    rows = [replace(row, share_of_raw=None) for row in measured.rows[:2]]
    without = replace(measured, rows=rows, notes=["raw reads without image: why"], cached=0.25)
    assert data_table(without, settings).row_count == 2
    assert data_lines(without, settings) == [
        "raw reads without image: why",
        "up to 25% of the files were in the page cache when a cold reading began",
    ]
    assert [row["share_of_raw"] for row in data_document(without, settings, commit=None)["readers"]] == [
        None
    ] * 2
