"""What a manifest of version 2 may say, and what it may not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from hpctrain.data.format.manifest import FieldSpec, Manifest

DOCUMENT: dict[str, Any] = {
    "kind": "samples",
    "samples": 3,
    "block_bytes": 64,
    "indexed": True,
    "fields": {
        "x": {"dtype": "float32", "shape": [4]},
        "y": {"dtype": "int64", "shape": [], "kind": "classes", "classes": ["a", "b"]},
        "z": {"dtype": "int16", "shape": [9], "kind": "ragged"},
    },
    "statistics": {"x": {"mean": 0.5, "std": 1, "min": 0, "max": 2, "count": 12}},
    "shards": [
        {
            "file": "../files/a.h5",
            "samples": 2,
            "file_bytes": 500,
            "modified_ns": 1,
            "fields": {
                "x": {"dataset": "/g/x", "offset": 400, "num_bytes": 32, "first_row": 1, "big_endian": True},
                "y": {"dataset": "/g/y", "offset": None, "num_bytes": 7, "first_row": 1},
                "z": {"dataset": "/g/z", "offset": None, "num_bytes": 20, "first_row": 1},
            },
        },
        {
            "file": "/elsewhere/b.h5",
            "samples": 1,
            "file_bytes": 500,
            "fields": {
                "x": {"dataset": "/x", "offset": None, "num_bytes": 16, "member": "m", "whole": True},
                "y": {"dataset": "/y", "offset": None, "num_bytes": 1, "whole": True},
                "z": {"dataset": "/z", "offset": 100, "num_bytes": 6, "whole": True, "hashes": ["0" * 16]},
            },
        },
    ],
}


def test_fields_of_all_kinds_and_what_a_batch_holds_of_them() -> None:
    manifest = Manifest.model_validate(DOCUMENT)
    assert list(manifest.batch_fields) == ["x", "y", "z", "z.length"]
    assert manifest.batch_fields["z.length"] == FieldSpec(dtype="int64", shape=())
    assert manifest.entry_shape("x", manifest.shards[0]) == (2, 4)
    assert manifest.entry_shape("x", manifest.shards[1]) == (4,)
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_statistics_do_not_make_another_dataset() -> None:
    without = Manifest.model_validate({**DOCUMENT, "statistics": {}})
    assert Manifest.model_validate(DOCUMENT).fingerprint == without.fingerprint


def test_entries_of_one_file_count_its_bytes_once() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["shards"][1]["file"] = "../files/a.h5"
    assert Manifest.model_validate(document).file_bytes == 500


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("indexed", False, "'../files/a.h5' is not a plain file name"),
        ("shards.0.file", "../files/..", "is not a file name"),
        ("shards.0.fields.x.whole", True, "is a whole HDF5 dataset: the shard must have exactly one sample"),
        ("shards.0.fields.x.num_bytes", 16, "has 16 bytes, 2 samples need 32"),
        ("shards.0.fields.x.first_row", 5, "ends after the end of the file"),
        ("shards.1.fields.z.hashes", ["0" * 16] * 2, "has 2 hashes, not 1"),
        ("shards.1.file", "", "is not a file name"),
        ("fields.x.classes", ["a"], "only integers that are not ragged can have names of classes"),
        ("fields.y.classes", [], "at least one class name"),
        ("fields.y.classes", ["a", "a"], "named twice"),
        ("fields.z.shape", [], "must have at least one dimension"),
        ("statistics.q", {"mean": 0, "std": 0, "min": 0, "max": 0, "count": 0}, "does not have"),
        ("windows", {"file": "w.npy", "file_bytes": 9, "hash": "0" * 16}, "a list of windows is needed if"),
        ("samples", 4, "the shards add up to 3"),
    ],
)
def test_what_does_not_fit_together_is_refused(place: str, value: Any, message: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    *path, last = place.split(".")
    target: Any = document
    for step in path:
        target = target[int(step)] if isinstance(target, list) else target[step]
    target[last] = value
    with pytest.raises(ValidationError, match=message):
        Manifest.model_validate(document)


def test_the_same_rows_twice_and_a_field_named_as_a_length_are_refused() -> None:
    twice = copy.deepcopy(DOCUMENT)
    twice["shards"] = [twice["shards"][0]] * 2
    with pytest.raises(ValidationError, match="listed twice"):
        Manifest.model_validate({**twice, "samples": 4})
    named = copy.deepcopy(DOCUMENT)
    named["fields"]["z.length"] = named["fields"]["x"]
    with pytest.raises(ValidationError, match=r"fields z\.length have the names of lengths of ragged fields"):
        Manifest.model_validate(named)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (None, "a list of windows is needed if windows are split"),
        ({"file": "../w.npy", "file_bytes": 9, "hash": "0" * 16}, "should match pattern"),
    ],
)
def test_split_token_windows_need_their_list_beside_the_manifest(windows: Any, message: str) -> None:
    document: dict[str, Any] = {
        "kind": "tokens",
        "samples": 2,
        "block_bytes": 64,
        "fields": {"tokens": {"dtype": "int32", "shape": [5]}},
        "tokens": {"window": 4, "stride": 4, "boundaries": "split", "documents": "/docs"},
        "windows": {"file": "windows.npy", "file_bytes": 9, "hash": "0" * 16},
        "shards": [
            {
                "file": "shard-00000.h5",
                "samples": 2,
                "file_bytes": 500,
                "fields": {"tokens": {"dataset": "tokens", "offset": 0, "num_bytes": 400}},
            }
        ],
    }
    manifest = Manifest.model_validate(document)
    assert manifest.is_split
    assert manifest.entry_shape("tokens", manifest.shards[0]) == (100,)
    with pytest.raises(ValidationError, match=message):
        Manifest.model_validate({**document, "windows": windows})
