"""Kinds of fields that are read in chunks or by HDF5: variable lengths, strings, whole files, listed windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data import Dataset
from hpctrain.data.format.manifest import Manifest, WindowList, write_manifest
from hpctrain.data.format.token_windows import write_windows

RANDOM = np.random.default_rng(3)


def index(
    directory: Path, fields: dict[str, dict[str, Any]], shards: list[dict[str, Any]], **more: Any
) -> Dataset:
    """A dataset over files as they are. shards: file, samples, and of each field what StoredField has."""
    entries = []
    for shard in shards:
        status = (directory / shard["file"]).stat()
        entries.append({"file_bytes": status.st_size, "modified_ns": status.st_mtime_ns, **shard})
    manifest = Manifest.model_validate(
        {
            "kind": "samples",
            "samples": sum(shard["samples"] for shard in shards),
            "block_bytes": 1 << 20,
            "fields": fields,
            "indexed": True,
            "shards": entries,
            **more,
        }
    )
    write_manifest(manifest, directory=directory)
    return Dataset.open(directory)


def at(dataset: str, num_bytes: int, **more: Any) -> dict[str, Any]:
    return {"dataset": dataset, "num_bytes": num_bytes, "offset": None, **more}


def test_variable_lengths_strings_members_and_rows_from_the_middle_are_read(tmp_path: Path) -> None:
    lengths = np.array([3, 0, 5, 1])
    samples = [np.arange(length, dtype=np.int32) + 10 for length in lengths]
    table = np.zeros(6, dtype=[("id", "i8"), ("v", ">f4", (2,))])
    table["v"] = np.arange(12).reshape(6, 2)
    with h5py.File(tmp_path / "mixed.h5", "w") as file:
        ragged = file.create_dataset("g/ragged", (4,), dtype=h5py.vlen_dtype(np.int32))
        for number, sample in enumerate(samples):
            ragged[number] = sample
        file["fixed"] = np.array([b"cat", b"dog", b"cat", b"eel"])
        file.create_dataset("text", data=["dog", "eel", "cat", "cat"], dtype=h5py.string_dtype())
        file.create_dataset("table", data=table, chunks=(2,), compression="gzip")
    names = ("cat", "dog", "eel")
    dataset = index(
        tmp_path,
        {
            "seq": {"dtype": "int32", "shape": [5], "kind": "ragged"},
            "fixed": {"dtype": "int64", "shape": [], "kind": "classes", "classes": names},
            "text": {"dtype": "int64", "shape": [], "kind": "classes", "classes": names},
            "v": {"dtype": "float32", "shape": [2]},
        },
        [
            {
                "file": "mixed.h5",
                "samples": 4,
                "fields": {
                    "seq": at("/g/ragged", 36),
                    "fixed": at("fixed", 12),
                    "text": at("text", 12),
                    "v": at("table", 32, member="v", first_row=2, big_endian=True),
                },
            }
        ],
    )
    order = np.array([2, 0, 3, 1, 0])
    found = dataset.gather(order)
    assert found["seq.length"].tolist() == lengths[order].tolist()
    for row, number in zip(found["seq"], order, strict=True):
        assert row.tolist() == [*samples[number], *[0] * (5 - lengths[number])]
    assert found["fixed"].tolist() == [0, 0, 2, 1, 0]
    assert found["text"].tolist() == [0, 1, 0, 2, 1]
    assert np.array_equal(found["v"], table["v"][2:][order])


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (2, 3), "compression": "gzip"}], ids=["contiguous", "gzip"]
)
def test_a_file_a_sample_is_read_whole_padded_where_lengths_differ(tmp_path: Path, options: Any) -> None:
    images = [RANDOM.random((4, 5)).astype(np.float32) for _ in range(3)]
    rows = [np.full((length, 4), length, dtype=np.int16) for length in (3, 6, 4)]
    shards = []
    for number, (image, row) in enumerate(zip(images, rows, strict=True)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("image", data=image.astype(">f4" if number == 1 else "<f4"), **options)
            file.create_dataset("rows", data=row, **options)
            file["number"] = np.int32(number)
            file["name"] = f"class {number}"
            offset = file["image"].id.get_offset()
        fields = {
            "image": at("image", 80, offset=offset, whole=True, big_endian=number == 1),
            "rows": at("rows", row.nbytes, whole=True),
            "number": at("number", 4, whole=True),
            "name": at("name", 7, whole=True),
        }
        shards.append(
            {"file": f"{number}.h5", "samples": 1, "fields": {**fields, "image": {**fields["image"]}}}
        )
    dataset = index(
        tmp_path,
        {
            "image": {"dtype": "float32", "shape": [4, 5]},
            "rows": {"dtype": "int16", "shape": [6, 4], "kind": "ragged"},
            "number": {"dtype": "int32", "shape": []},
            "name": {
                "dtype": "int64",
                "shape": [],
                "kind": "classes",
                "classes": ["class 2", "class 1", "class 0"],
            },
        },
        shards,
    )
    found = dataset.gather(np.array([2, 1, 0, 2]))
    assert np.array_equal(found["image"], np.stack(images)[[2, 1, 0, 2]])
    assert found["rows.length"].tolist() == [4, 6, 3, 4]
    assert found["rows"][:, :, 0].tolist() == [
        [4] * 4 + [0] * 2,
        [6] * 6,
        [3] * 3 + [0] * 3,
        [4] * 4 + [0] * 2,
    ]
    assert found["number"].tolist() == [2, 1, 0, 2]
    assert found["name"].tolist() == [0, 1, 2, 0]


def test_listed_windows_begin_where_the_list_says(tmp_path: Path) -> None:
    tokens = np.arange(400, dtype=np.int32)
    for name, options in (("a.h5", {}), ("b.h5", {"chunks": (33,)})):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("t", data=tokens, **options)
    starts = np.array([0, 9, 380, 5, 32, 90], dtype=np.int64)
    listed: WindowList = write_windows(starts, directory=tmp_path)
    shard = {"samples": 3, "fields": {"tokens": at("t", 1590, first_row=2)}}
    shard["fields"]["tokens"]["num_bytes"] = 4 * 398
    dataset = index(
        tmp_path,
        {"tokens": {"dtype": "int32", "shape": [11]}},
        [{"file": "a.h5", **shard}, {"file": "b.h5", **shard}],
        kind="tokens",
        tokens={"window": 10, "stride": 10, "boundaries": "split"},
        windows=listed.model_dump(),
    )
    order = RANDOM.permutation(6)
    expected = starts[order][:, None] + 2 + np.arange(11)
    assert np.array_equal(dataset.gather(order)["tokens"], expected)
