from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.data import Dataset, read_manifest, verify_dataset
from hpctrain.data.format.token_windows import split_windows
from hpctrain.data.indexing.index_files import IndexPaths, IndexReading, OldIndex, TokenRequest, index_files
from hpctrain.data.indexing.request import SampleIs, find_files, parse_field_paths
from hpctrain.errors import DataError, UsageError
from tests.unit.data.indexing.test_index_refused import rows_beside_references

IMAGES = np.random.default_rng(3).integers(0, 255, (30, 6, 5)).astype(np.uint8)
LABELS = np.arange(30, dtype=np.int32)
SHUFFLED = np.random.default_rng(4).permutation(30).astype(np.int64)


def three_files(directory: Path, **options: Any) -> list[str]:
    """10 rows each of IMAGES and LABELS."""
    names = []
    for number in range(3):
        rows = slice(number * 10, number * 10 + 10)
        names.append(str(directory / f"f{number}.h5"))
        with h5py.File(names[-1], "w") as file:
            file.create_dataset("data/images", data=IMAGES[rows], **options)
            file.create_dataset("labels", data=LABELS[rows])
    return names


def opened(out: Path, *, files: list[str], fields: str, **options: Any) -> Dataset:
    index_files(out, files=files, fields=fields, **options)
    return Dataset.open(out)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (4, 6, 5)},
        {"chunks": (3, 4, 2), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"compression": "lzf"},
        {"chunks": (4, 6, 5), **hdf5plugin.Zstd()},
        {"chunks": (4, 6, 5), **hdf5plugin.Blosc2()},
        {"maxshape": (None, 6, 5)},
        {"dtype": ">u2"},
        {"dtype": ">f8", "compression": "gzip"},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items())[:40] or "contiguous",
)
def test_rows_of_many_files_become_samples_whatever_their_storage(
    options: dict[str, Any], tmp_path: Path
) -> None:
    three_files(tmp_path, **options)
    dataset = opened(tmp_path / "index", files=[f"{tmp_path}/*.h5"], fields="x=/data/images,y=/labels")
    batch = dataset.gather(SHUFFLED)
    assert batch["x"].dtype == np.dtype(options.get("dtype", "u1")).newbyteorder("=")
    assert np.array_equal(batch["x"], IMAGES[SHUFFLED])
    assert np.array_equal(batch["y"], LABELS[SHUFFLED])
    assert dataset.manifest.indexed
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["manifest.json"]


def test_a_compact_dataset_and_a_file_with_a_user_block_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["x"] = IMAGES
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(LABELS.shape)
        h5py.h5d.create(file.id, b"y", h5py.h5t.STD_I32LE, space, plist).write(
            h5py.h5s.ALL, h5py.h5s.ALL, LABELS
        )
    dataset = opened(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=x,y=y")
    batch = dataset.gather(SHUFFLED)
    assert np.array_equal(batch["x"], IMAGES[SHUFFLED])
    assert np.array_equal(batch["y"], LABELS[SHUFFLED])


def test_rows_that_were_never_written_are_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (5, 2), "f4", fillvalue=7)
        file.create_dataset("y", (5, 2), "f4", fillvalue=8, chunks=(2, 2))[0] = 1
    batch = opened(tmp_path / "index", files=[str(tmp_path)], fields="x=x,y=y").gather(np.arange(5))
    assert (batch["x"] == 7).all()
    assert batch["y"][:, 0].tolist() == [1, 8, 8, 8, 8]


def test_one_sample_a_file_in_the_order_that_people_count(tmp_path: Path) -> None:
    for number in range(12):
        with h5py.File(tmp_path / f"scan{number}.hdf5", "w") as file:
            file["volume"] = np.full((3, 4, 5), number, np.float32)
            file["age"] = np.float64(number / 2)
            file["site"] = "north" if number % 3 else "south"
    dataset = opened(
        tmp_path / "index",
        files=[str(tmp_path)],
        fields="x=/volume,age=/age,site=/site",
        samples=SampleIs.FILE,
    )
    batch = dataset.gather(np.array([11, 2, 3]))
    assert batch["x"].shape == (3, 3, 4, 5)
    assert batch["x"][:, 1, 1, 1].tolist() == [11, 2, 3]
    assert batch["age"].tolist() == [5.5, 1, 1.5]
    assert [dataset.fields["site"].classes[n] for n in batch["site"]] == ["north", "north", "south"]


def test_one_sample_a_file_of_different_lengths_is_padded_if_asked(tmp_path: Path) -> None:
    for number in range(1, 5):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            options = {"chunks": (1, 2)} if number % 2 else {}
            file.create_dataset("x", data=np.full((number, 2), number, np.int16), **options)
    with pytest.raises(DataError, match=r"shape \(1, 2\).* but \(2, 2\) in /x of .*2.h5: --pad x pads"):
        index_files(tmp_path / "index", files=[str(tmp_path)], fields="x=x", samples=SampleIs.FILE)
    fields = parse_field_paths("x=x", padded=["x"])
    dataset = opened(tmp_path / "index", files=[str(tmp_path)], fields=fields, samples=SampleIs.FILE)  # type: ignore[arg-type]
    batch = dataset.gather(np.array([3, 0, 2]))
    assert batch["x.length"].tolist() == [4, 1, 3]
    assert batch["x"][..., 0].tolist() == [[4, 4, 4, 4], [1, 0, 0, 0], [3, 3, 3, 0]]


def test_groups_of_a_file_become_samples(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for number in (10, 9, 2):
            file[f"runs/g{number}/image"] = np.full((2, 2), number, np.uint8)
            file[f"runs/g{number}/label"] = number
        file["runs/note"] = 1
    dataset = opened(
        tmp_path / "index", files=[str(tmp_path / "all.h5")], fields="x=/runs/*/image,y=/runs/*/label"
    )
    batch = dataset.gather(np.arange(3))
    assert batch["x"][:, 0, 0].tolist() == [2, 9, 10]
    assert batch["y"].tolist() == [2, 9, 10]
    assert dataset.manifest.file_bytes == (tmp_path / "all.h5").stat().st_size


def test_rows_of_groups_become_samples_if_asked(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "demos.h5", "w") as file:
        for number, length in enumerate((3, 2)):
            file[f"data/demo_{number}/action"] = np.full((length, 7), number, np.float32)
    dataset = opened(
        tmp_path / "index",
        files=[str(tmp_path)],
        fields="action=/data/demo_*/action",
        samples=SampleIs.ROWS,
    )
    assert dataset.gather(np.arange(5))["action"][:, 0].tolist() == [0, 0, 0, 1, 1]


def test_variable_lengths_are_padded_and_strings_become_classes(tmp_path: Path) -> None:
    rows = [np.arange(n, dtype=np.int32) + 1 for n in (3, 0, 5, 1)]
    names = ["dog", "cat", "dog", "eel"]
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            data = file.create_dataset("x", (2,), h5py.vlen_dtype(np.int32))
            data[0], data[1] = rows[number * 2 : number * 2 + 2]
            strings = names[number * 2 : number * 2 + 2]
            file["y"] = strings if number else np.array(strings, "S3")  # variable length, and fixed
    dataset = opened(tmp_path / "index", files=[str(tmp_path)], fields="x=x,y=y")
    assert dataset.fields["y"].classes == ("cat", "dog", "eel")
    batch = dataset.gather(np.array([2, 0, 1, 3]))
    assert batch["x"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]
    assert batch["x.length"].tolist() == [5, 3, 0, 1]
    assert batch["y"].tolist() == [1, 1, 0, 2]


def test_members_of_a_table_are_fields(tmp_path: Path) -> None:
    table = np.zeros(6, [("id", ">i4"), ("name", "S4"), ("spectrum", "<f4", (3,))])
    table["id"], table["name"], table["spectrum"][:, 2] = np.arange(6), [b"ab", b"c"] * 3, np.arange(6) / 2
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["table"] = table
    dataset = opened(
        tmp_path / "index",
        files=[str(tmp_path)],
        fields="id=/table:id,name=/table:name,s=/table:spectrum",
        reading=IndexReading.CONTENT,
    )
    batch = dataset.gather(np.array([5, 0, 3]))
    assert batch["id"].tolist() == [5, 0, 3]
    assert batch["name"].tolist() == [1, 0, 1]
    assert np.array_equal(batch["s"], table["spectrum"][[5, 0, 3]])
    assert dataset.manifest.statistics["s"].max == 2.5


def test_a_table_with_references_is_read_if_all_rows_are_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows_beside_references(file, written=32)
    dataset = opened(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=/x:b")
    np.testing.assert_array_equal(dataset.gather(np.arange(32))["x"], np.arange(32.0))


def test_a_boolean_keeps_its_hash_whatever_its_byte(tmp_path: Path) -> None:
    kind = h5py.h5t.py_create(np.dtype(bool), logical=True)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create(h5py.h5s.SCALAR))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(77, np.uint8), kind)
    reading = {"samples": SampleIs.FILE, "reading": IndexReading.CONTENT}
    dataset = opened(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=/x", **reading)
    assert dataset.gather(np.arange(1))["x"].tolist() == [True]
    assert verify_dataset(tmp_path / "index") == []


def test_soft_links_within_the_file_are_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v1/images"] = IMAGES
        file["latest"] = h5py.SoftLink("/v1")
    dataset = opened(tmp_path / "index", files=[str(tmp_path)], fields="x=/latest/images")
    assert dataset.manifest.shards[0].fields["x"].dataset == "/v1/images"
    assert np.array_equal(dataset.gather(SHUFFLED)["x"], IMAGES[SHUFFLED])


def test_token_streams_are_cut_into_windows(tmp_path: Path) -> None:
    for number, length in enumerate((50, 4, 23)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["tokens"] = (np.arange(length) + 100 * number).astype(">u2")
    request = TokenRequest(window=8, stride=5)
    indexed = index_files(
        tmp_path / "index",
        files=[str(tmp_path)],
        fields="tokens=tokens",
        tokens=request,
        reading=IndexReading.CONTENT,
    )
    assert [Path(path).name for path in indexed.too_short] == ["1.h5"]
    dataset = Dataset.open(tmp_path / "index")
    windows = dataset.gather(np.arange(dataset.num_samples))["tokens"]
    starts = [*range(0, 42, 5), *range(200, 215, 5)]
    assert windows.tolist() == [list(range(start, start + 9)) for start in starts]
    assert verify_dataset(tmp_path / "index") == []


def test_no_window_crosses_the_start_of_a_document(tmp_path: Path) -> None:
    borders = {0: [0, 20, 29, 33], 1: [12]}
    for number, starts in borders.items():
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["tokens"] = np.arange(50, dtype=np.int32) + 100 * number
            file["starts"] = np.array(starts)
    dataset = opened(
        tmp_path / "index",
        files=[str(tmp_path)],
        fields="tokens=tokens",
        tokens=TokenRequest(window=8, stride=8, documents="starts"),
    )
    windows = dataset.gather(np.arange(dataset.num_samples))["tokens"]
    starts = [0, 8, 20, 33, 41, 100, 112, 120, 128, 136]
    assert windows[:, 0].tolist() == starts
    assert np.array_equal(windows, np.array(starts)[:, None] + np.arange(9))
    list_of_windows = tmp_path / "index" / "windows.npy"
    np.save(list_of_windows, np.zeros(10, np.int64))
    with pytest.raises(DataError, match=r"list of windows .* is not the one of the manifest"):
        Dataset.open(tmp_path / "index")
    list_of_windows.unlink()
    with pytest.raises(DataError, match=r"list of windows .* is missing"):
        Dataset.open(tmp_path / "index")


def test_split_windows_agree_with_counting_document_by_document() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        num_tokens = int(random.integers(1, 200))
        documents = np.sort(random.integers(0, num_tokens + 1, int(random.integers(0, 9))))
        window, stride = (int(n) for n in random.integers(1, 20, 2))
        borders = sorted({0, num_tokens, *documents.tolist()})
        expected = [start for first, end in pairwise(borders) for start in range(first, end - window, stride)]
        found = split_windows(documents, num_tokens=num_tokens, window=window, stride=stride)
        assert found.dtype == np.int64
        assert found.tolist() == expected


def test_hashes_find_damage_and_statistics_are_of_the_content(tmp_path: Path) -> None:
    names = three_files(tmp_path, dtype=">f4", chunks=(3, 6, 5), compression="gzip")
    out = tmp_path / "index"
    index_files(
        out, files=names, fields="x=/data/images,y=/labels", reading=IndexReading.CONTENT, block_bytes=256
    )
    statistics = read_manifest(out).statistics
    assert statistics["x"].count == IMAGES.size
    assert statistics["x"].mean == pytest.approx(IMAGES.mean(dtype=np.float64))
    assert statistics["x"].std == pytest.approx(IMAGES.std(dtype=np.float64))
    assert (statistics["y"].min, statistics["y"].max) == (0, 29)
    assert verify_dataset(out) == []
    entry = read_manifest(out).shards[1]
    offset = entry.fields["y"].offset
    assert offset is not None
    with open(names[1], "r+b") as file:
        file.seek(offset + 4 * 7)
        file.write(b"\xff")
    os.utime(names[1], ns=(0, entry.modified_ns or 0))
    (damage,) = verify_dataset(out)
    assert (damage.field, damage.first_sample <= 7 <= damage.last_sample) == ("y", True)


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    names = three_files(tmp_path)
    opened(tmp_path / "index", files=names, fields="x=/data/images")
    with h5py.File(names[2], "r+") as file:
        file["labels"][0] = 99
    os.utime(names[2])
    with pytest.raises(DataError, match=r"f2.h5 has changed since it was indexed"):
        Dataset.open(tmp_path / "index")


def test_relative_paths_move_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    names = three_files(tmp_path / "a")
    index_files(tmp_path / "a/index", files=names, fields="y=labels", paths=IndexPaths.RELATIVE)
    assert read_manifest(tmp_path / "a/index").shards[0].file == "../f0.h5"
    (tmp_path / "a").rename(tmp_path / "b")
    assert np.array_equal(Dataset.open(tmp_path / "b/index").gather(SHUFFLED)["y"], LABELS[SHUFFLED])


def test_an_index_is_replaced_only_if_asked_and_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    names = three_files(tmp_path)
    out = tmp_path / "index"
    index_files(out, files=names, fields="y=labels")
    with pytest.raises(UsageError, match="already holds an index: --overwrite"):
        index_files(out, files=names, fields="y=labels")
    with pytest.raises(DataError, match="has no /nothing"):
        index_files(out, files=names, fields="y=/nothing", old=OldIndex.REPLACE)
    assert list(read_manifest(out).fields) == ["y"]
    index_files(out, files=names, fields="z=labels", old=OldIndex.REPLACE)
    assert list(read_manifest(out).fields) == ["z"]


def test_paths_that_leave_the_directory_belong_to_indexes_alone(tmp_path: Path) -> None:
    names = three_files(tmp_path)
    manifest = index_files(tmp_path / "index", files=names, fields="y=labels").manifest
    document = manifest.model_dump(mode="json")
    document["indexed"] = False
    with pytest.raises(ValueError, match="is not a plain file name"):
        type(manifest).model_validate(document)


def test_a_manifest_of_version_1_is_read_with_the_fingerprint_it_had(tmp_path: Path) -> None:
    document = {
        "version": 1,
        "kind": "samples",
        "samples": 2,
        "block_bytes": 1024,
        "fields": {"x": {"dtype": "int64", "shape": [1]}},
        "tokens": None,
        "attributes": {},
        "shards": [
            {
                "file": "shard-00000.h5",
                "samples": 2,
                "file_bytes": 4096,
                "structure_hash": "0" * 16,
                "fields": {"x": {"dataset": "x", "offset": 2048, "num_bytes": 16, "hashes": ["1" * 16]}},
            }
        ],
    }
    text = json.dumps({**document, "checksum": "33f847de6aca638d"})
    (tmp_path / "manifest.json").write_text(text)
    manifest = read_manifest(tmp_path)
    assert manifest.fingerprint == "33f847de6aca638d"
    assert manifest.fields["x"].kind == "array"


def test_files_are_found_by_name_glob_and_directory_and_each_once(tmp_path: Path) -> None:
    names = three_files(tmp_path)
    (tmp_path / "notes.txt").write_text("no HDF5")
    assert find_files([str(tmp_path), names[1], f"{tmp_path}/**/f*.h5"]) == tuple(names)
    with pytest.raises(DataError, match=r"nothing matches '.*\*.nothing'"):
        find_files([f"{tmp_path}/*.nothing"])


def test_ranks_share_the_work_and_make_the_same_index(tmp_path: Path) -> None:
    names = three_files(tmp_path, chunks=(4, 6, 5), compression="gzip")
    fields = "x=/data/images,y=/labels"
    alone = index_files(tmp_path / "alone", files=names, fields=fields, reading=IndexReading.CONTENT).manifest
    out, progress = tmp_path / "shared", list[tuple[int, int | None]]()

    def on_a_rank(world: ThreadsWorld) -> Any:
        return index_files(
            out,
            files=names,
            fields=fields,
            reading=IndexReading.CONTENT,
            progress=(lambda done, total: progress.append((done, total))) if world.rank == 0 else None,
            comm=world,
        ).manifest

    manifests = run_threads(2, on_a_rank)
    assert manifests == [alone, alone]
    assert read_manifest(out) == alone
    assert progress == [(1, 2), (2, 2)] * 2  # rank 0 has two of the three files, and reads them twice

    def failing(world: ThreadsWorld) -> str:
        with pytest.raises(DataError, match="has no /labels/nothing") as error:
            index_files(out, files=names, fields="y=/labels/nothing", old=OldIndex.REPLACE, comm=world)
        assert error.value.agreed
        return str(error.value)

    messages = run_threads(2, failing)
    assert messages[0] == messages[1]
    assert read_manifest(out) == alone
