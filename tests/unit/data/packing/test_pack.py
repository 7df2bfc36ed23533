from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpctrain.data import (
    Dataset,
    EpochOrder,
    Existing,
    pack_arrays,
    pack_tokens,
    read_manifest,
    verify_dataset,
)
from hpctrain.data.format.manifest import DTYPES
from hpctrain.data.packing.pack import pack_source
from hpctrain.errors import DataError, UsageError


def some_fields(num_samples: int = 100) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "image": random.integers(0, 255, (num_samples, 3, 5), dtype=np.uint8),
        "value": random.random((num_samples, 7), dtype=np.float32),
        "label": np.arange(num_samples),
    }


def digest(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def test_shards_are_ordinary_hdf5_that_h5py_reads(tmp_path: Path) -> None:
    fields = some_fields()
    manifest = pack_arrays(tmp_path, fields, shard_samples=30)
    assert [shard.samples for shard in manifest.shards] == [30, 30, 30, 10]
    assert read_manifest(tmp_path) == manifest
    start = 0
    for shard in manifest.shards:
        with h5py.File(tmp_path / shard.file) as file:
            for name, array in fields.items():
                assert file[name].dtype == array.dtype
                assert np.array_equal(file[name][:], array[start : start + shard.samples])
                assert file[name].id.get_offset() == shard.fields[name].offset
        start += shard.samples


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_reads_a_shard(tmp_path: Path) -> None:
    pack_arrays(tmp_path, {"label": np.array([3, 1, 4, 1, 5])})
    command = ["h5dump", "-d", "/label", str(tmp_path / "shard-00000.h5")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "H5T_STD_I64LE" in text
    assert "(0): 3, 1, 4, 1, 5" in text


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_as_packed(tmp_path: Path, dtype: str) -> None:
    values = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    pack_arrays(tmp_path / "native", {"x": values})
    pack_arrays(tmp_path / "foreign", {"x": values.astype(np.dtype(dtype).newbyteorder(">"))})
    for name in ("native", "foreign"):
        found = Dataset.open(tmp_path / name).gather(np.array([2, 0]))["x"]
        assert found.dtype == np.dtype(dtype)
        assert np.array_equal(found, values[[2, 0]])
    assert digest(tmp_path / "native") == digest(tmp_path / "foreign")


def test_packing_the_same_samples_twice_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack_arrays(tmp_path / name, some_fields(), shard_samples=40)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 400), st.integers(1, 300), st.data())
def test_token_windows_are_the_windows_of_the_stream(
    window: int, stride: int, length: int, shard_bytes: int, data: st.DataObject
) -> None:
    import tempfile

    stream = np.random.default_rng(length).integers(0, 60000, max(length, window + 1)).astype(np.uint16)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    with tempfile.TemporaryDirectory() as directory:
        manifest = pack_tokens(
            directory,
            np.split(stream, cuts),
            window=window,
            stride=stride,
            dtype="uint16",
            shard_bytes=max(shard_bytes, 4 * window),  # not hundreds of shards of one window
        )
        dataset = Dataset.open(directory)
        starts = range(0, len(stream) - window, stride)
        assert dataset.num_samples == len(starts)
        assert manifest.attributes["stream_tokens"] == len(stream)
        found = dataset.gather(np.arange(dataset.num_samples))["tokens"]
        assert np.array_equal(found, np.stack([stream[s : s + window + 1] for s in starts]))
        assert verify_dataset(directory) == []


def test_a_stream_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the stream has 10 tokens, one window takes 11"):
        pack_tokens(tmp_path, [np.zeros(10, np.uint8)], window=10)


def test_tokens_that_do_not_fit_the_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tokens from 0 to 300 do not fit into uint8"):
        pack_tokens(tmp_path, [np.array([0, 300])], window=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, "a has 3, b has 4"),
        ({}, "there is none"),
        ({"a": np.zeros((0, 4))}, "no samples"),
        ({"a": np.zeros((3, 0))}, "they have no elements"),
        ({"a": np.array(["x", "y"])}, "has dtype <U1"),
        ({"a": np.array([1, 2], dtype=object)}, "has dtype object"),
        ({"a": np.array([1, 2], dtype=np.uint64)}, "has dtype uint64"),
        ({"a": np.array(5)}, "is a scalar"),
        ({"a/b": np.zeros(3)}, "field name 'a/b'"),
    ],
)
def test_arrays_that_make_no_dataset_are_refused(
    tmp_path: Path, fields: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pack_arrays(tmp_path / "out", fields)
    assert not (tmp_path / "out").exists()


def test_an_existing_dataset_is_replaced_only_when_asked(tmp_path: Path) -> None:
    pack_arrays(tmp_path, some_fields(90), shard_samples=30)
    with pytest.raises(UsageError, match="already holds a dataset"):
        pack_arrays(tmp_path, some_fields(20))
    with pytest.raises(UsageError, match="already holds a dataset"):
        pack_arrays(tmp_path, some_fields(20), existing="refuse")  # type: ignore[arg-type]
    manifest = pack_arrays(tmp_path, some_fields(20), existing=Existing.REPLACE)
    assert manifest.samples == Dataset.open(tmp_path).num_samples == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "shard-00000.h5"]


def test_files_that_belong_to_no_dataset_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"files that do not belong to a dataset \(thesis.tex\)"):
        pack_arrays(tmp_path, some_fields(), existing=Existing.REPLACE)
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_an_interrupted_packing_is_no_dataset_and_can_be_packed_again(tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_arrays(tmp_path, some_fields(), shard_samples=30, progress=interrupt)
    shards = ["shard-00000.h5", "shard-00001.h5"]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == shards
    (tmp_path / ".shard-00002.h5.partial").write_bytes(b"what SIGKILL leaves")
    with pytest.raises(DataError, match="unfinished"):
        Dataset.open(tmp_path)
    with pytest.raises(UsageError, match="holds an unfinished dataset"):
        pack_arrays(tmp_path, some_fields())
    assert pack_arrays(tmp_path, some_fields(), existing=Existing.REPLACE).samples == 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "shard-00000.h5"]


@pytest.mark.parametrize("limit_bytes", [1000, 100_000])
def test_a_file_system_that_is_full_is_a_data_error_and_leaves_no_dataset(
    tmp_path: Path, limit_bytes: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(DataError, match=r"shard-00000.h5 cannot be written"):
            pack_arrays(tmp_path, {"x": np.zeros((1000, 100))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [".packing.json"]
    assert pack_arrays(tmp_path, {"x": np.zeros((1000, 100))}, existing=Existing.RESUME).samples == 1000


def test_a_directory_that_cannot_be_made_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used for a dataset"):
        pack_arrays(tmp_path / "file" / "below", some_fields())


def test_digits_are_split_without_overlap_and_by_seed(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    made = pack_source("digits", out=tmp_path / "a", seed=3)
    again = pack_source("digits", out=tmp_path / "b", seed=3)
    other = pack_source("digits", out=tmp_path / "c", seed=4)
    assert list(made) == [tmp_path / "a" / "train", tmp_path / "a" / "test"]
    assert [m.samples for m in made.values()] == [1438, 359]
    assert list(made.values()) == list(again.values())
    assert list(made.values()) != list(other.values())
    bunch = load_digits()
    order = EpochOrder(num_samples=1797, seed=3).at(0, 1797)
    test = Dataset.open(tmp_path / "a" / "test").gather(np.arange(359))
    train = Dataset.open(tmp_path / "a" / "train").gather(np.arange(1438))
    assert test["image"].shape == (359, 1, 8, 8)
    assert np.array_equal(test["image"][:, 0], bunch.images[order[:359]])
    assert np.array_equal(train["image"][:, 0], bunch.images[order[359:]])
    assert np.array_equal(train["label"], bunch.target[order[359:]])


def write_texts(root: Path, count: int = 30) -> Path:
    for number in range(count):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{number}>" * 40)
    (root / "picture.bin").write_bytes(b"\xff\xfe\x00\x01")
    (root / ".hidden").write_text("secret")
    return root


def stream_of(directory: Path) -> bytes:
    dataset = Dataset.open(directory)
    windows = dataset.gather(np.arange(dataset.num_samples))["tokens"]
    return windows[:, :-1].tobytes() + windows[-1:, -1].tobytes()


def test_held_out_texts_are_never_in_training_and_do_not_move_when_files_are_added(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    made = pack_source(f"text:{texts}", out=tmp_path / "a", window=4, held_out=0.3)
    train, test = stream_of(tmp_path / "a" / "train"), stream_of(tmp_path / "a" / "test")
    held_out = {n for n in range(30) if f"<{n}>".encode() in test}
    assert held_out == {n for n in range(30) if f"<{n}>".encode() not in train}
    assert 0 < len(held_out) < 30
    assert b"secret" not in train + test
    assert made[tmp_path / "a" / "train"].attributes["skipped_files"] == 1
    assert made[tmp_path / "a" / "train"].attributes["vocabulary"] == 256
    write_texts(texts, count=40)
    pack_source(str(texts), out=tmp_path / "b", window=4, held_out=0.3)
    more = stream_of(tmp_path / "b" / "test")
    assert held_out == {n for n in range(30) if f"<{n}>".encode() in more}


def test_a_text_source_of_two_files_has_one_in_each_part(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=2)
    made = pack_source(str(texts), out=tmp_path / "out", window=4, held_out=0.01)
    assert [m.attributes["files"] for m in made.values()] == [1, 1]


def test_python_source_has_no_tests_and_no_held_out_file_in_training(tmp_path: Path) -> None:
    made = pack_source("python-source", out=tmp_path, window=256)
    train, test = made.values()
    assert train.attributes["files"] > 100
    assert 0.02 < test.samples / (train.samples + test.samples) < 0.3
    import argparse
    import json as json_module

    for module in (argparse, json_module):
        text = Path(module.__file__ or "").read_bytes()
        head = text[2000:2400]
        where = [head in stream_of(directory) for directory in made]
        assert sum(where) == 1, module.__name__


def test_npz_becomes_one_dataset_or_two(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **some_fields())
    assert list(pack_source(str(tmp_path / "x.npz"), out=tmp_path / "one")) == [tmp_path / "one"]
    made = pack_source(str(tmp_path / "x.npz"), out=tmp_path / "two", held_out=0.25)
    assert [m.samples for m in made.values()] == [75, 25]
    labels = [Dataset.open(d).gather(np.arange(m.samples))["label"] for d, m in made.items()]
    assert sorted(np.concatenate(labels)) == list(range(100))


def bad_source(name: str, root: Path) -> tuple[str, dict[str, Any]]:
    if name == "pickled":
        np.savez(root / "x.npz", a=np.array([{}], dtype=object))
    elif name == "damaged":
        (root / "x.npz").write_bytes(b"PK\x03\x04 not really")
    elif name == "unequal":
        np.savez(root / "x.npz", a=np.zeros(3), b=np.zeros(2))
    elif name == "textless":
        (root / "texts").mkdir()
        return str(root / "texts"), {}
    elif name == "windowed":
        return "digits", {"window": 5}
    elif name == "share":
        return "digits", {"held_out": 1.5}
    elif name == "unknown":
        return "cifar", {}
    return str(root / "x.npz"), {}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("missing", DataError, "does not exist"),
        ("pickled", DataError, "cannot be read as .npz without pickle"),
        ("damaged", DataError, "cannot be read as .npz"),
        ("unequal", DataError, "differ in their number of samples"),
        ("textless", DataError, "holds no UTF-8 text files"),
        ("windowed", UsageError, "the source digits holds arrays"),
        ("share", UsageError, "--held-out 1.5"),
        ("unknown", UsageError, "unknown source 'cifar': digits, python-source"),
    ],
)
def test_bad_sources_are_refused(tmp_path: Path, name: str, kind: type[Exception], message: str) -> None:
    source, options = bad_source(name, tmp_path)
    with pytest.raises(kind, match=message):
        pack_source(source, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_manifest_is_json_that_says_where_the_bytes_are(tmp_path: Path) -> None:
    fields = some_fields(10)
    pack_arrays(tmp_path, fields, attributes={"num_classes": 10})
    document = json.loads((tmp_path / "manifest.json").read_text())
    assert document["version"] == 2
    assert document["attributes"] == {"num_classes": 10}
    stored = document["shards"][0]["fields"]["value"]
    data = (tmp_path / "shard-00000.h5").read_bytes()
    assert data[stored["offset"] :][: stored["num_bytes"]] == fields["value"].tobytes()
