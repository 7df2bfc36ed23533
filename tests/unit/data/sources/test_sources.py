"""Sources of `hpctrain data pack`: pictures, tables, arrays in files, iterators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from hpctrain.data import Dataset, Manifest
from hpctrain.data.hdf5.filters import ChunkCodec
from hpctrain.data.packing.pack import pack_source
from hpctrain.data.sources.numpy_files import Colour, parse_image_size
from hpctrain.data.sources.registry import SourceOptions
from hpctrain.data.sources.tables import parse_table_fields
from hpctrain.data.sources.text import TextDocuments
from hpctrain.errors import DataError, UsageError


def pack(source: str | Path, out: Path, **options: Any) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Pack into one dataset; the manifest and all samples."""
    (manifest,) = pack_source(str(source), out=out, **options).values()
    dataset = Dataset.open(out)
    return manifest, dataset.gather(np.arange(dataset.num_samples))


def save_pictures(root: Path) -> dict[str, np.ndarray]:
    """Six pictures in two classes, without loss: name -> (height, width, 3)."""
    random = np.random.default_rng(0)
    made = {}
    for number in range(6):
        name = f"{'cat' if number % 2 else 'dog'}/deep/{number}.png"
        made[name] = random.integers(0, 256, (8, 12, 3), dtype=np.uint8)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(made[name]).save(root / name)
    (root / "dog" / "notes.txt").write_text("no picture")
    return made


def test_pictures_in_folders_become_images_and_class_numbers(tmp_path: Path) -> None:
    made = save_pictures(tmp_path / "photos")
    manifest, found = pack(f"images:{tmp_path / 'photos'}", tmp_path / "out", shard_bytes=1000)
    assert manifest.fields["image"].shape == (3, 8, 12)
    assert manifest.fields["label"].classes == ("cat", "dog")
    assert manifest.attributes["num_classes"] == 2
    assert found["label"].tolist() == [0, 0, 0, 1, 1, 1]
    for image, name in zip(found["image"], sorted(made), strict=True):
        assert np.array_equal(image.transpose(1, 2, 0), made[name])
    assert manifest.statistics["image"].mean == pytest.approx(found["image"].mean())
    assert "label" not in manifest.statistics


def test_pictures_are_made_alike_only_when_asked(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    save_pictures(root)
    Image.new("L", (30, 30), 77).save(root / "dog" / "a.jpg")
    with pytest.raises(DataError, match=r"a.jpg has 30x30 pixels, .* has 8x12: use --size"):
        pack(f"images:{root}", tmp_path / "out")
    options = SourceOptions(image_size=parse_image_size("6x4"), colour=Colour.GREY)
    _, found = pack(f"images:{root}", tmp_path / "small", options=options, shuffle=True, seed=5)
    assert found["image"].shape == (7, 1, 6, 4)
    assert sorted(found["label"].tolist()) == [0, 0, 0, 1, 1, 1, 1]
    assert found["label"].tolist() != sorted(found["label"].tolist())
    (grey,) = [image for image in found["image"] if image.std() == 0]
    assert grey.max() == 77
    (root / "dog" / "b.png").write_bytes(b"\x89PNG no more")
    with pytest.raises(DataError, match=r"b.png cannot be decoded"):
        pack(f"images:{root}", tmp_path / "damaged", options=options)


FIELDS = "x=height+width:float32,kind=animal,id=number"


def table() -> pandas.DataFrame:
    number = np.arange(20)
    return pandas.DataFrame({
        "number": number,
        "height": number * 0.5,
        "width": number + 0.25,
        "animal": [("dog", "cat", "ape")[n % 3] for n in number],
    })  # fmt: skip


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_columns_of_tables_become_fields(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table.{suffix}"
    if suffix == "parquet":
        table().to_parquet(path, row_group_size=6)
    else:
        table().to_csv(path, index=False, sep="," if suffix == "csv" else "\t")
    options = SourceOptions(fields=parse_table_fields(FIELDS))
    manifest, found = pack(path, tmp_path / "out", options=options, shard_bytes=160)
    assert manifest.attributes["source"] == path.name
    assert len(manifest.shards) > 2
    assert manifest.fields["kind"].classes == ("ape", "cat", "dog")
    assert found["x"].dtype == np.float32
    assert np.array_equal(found["x"], np.stack([np.arange(20) * 0.5, np.arange(20) + 0.25], axis=1))
    assert [manifest.fields["kind"].classes[k] for k in found["kind"]] == table()["animal"].tolist()
    every, _ = pack(path, tmp_path / "every")
    assert list(every.fields) == ["number", "height", "width", "animal"]
    parts = pack_source(str(path), out=tmp_path / "parts", held_out=0.25, options=options)
    ids = [Dataset.open(d).gather(np.arange(m.samples))["id"] for d, m in parts.items()]
    assert [len(part) for part in ids] == [15, 5]
    assert sorted(np.concatenate(ids).tolist()) == list(range(20))


def test_lists_in_parquet_and_several_files(tmp_path: Path) -> None:
    for number in range(2):
        frame = pandas.DataFrame(
            {"v": [np.arange(3.0) + k for k in range(4)], "n": np.arange(4) + 4 * number}
        )
        frame.to_parquet(tmp_path / f"{number}.parquet")
    _, found = pack(f"parquet:{tmp_path}", tmp_path / "out")
    assert found["v"].shape == (8, 3)
    assert found["n"].tolist() == list(range(8))
    pandas.DataFrame({"v": [[1.0], [1.0, 2.0]]}).to_parquet(tmp_path / "odd.pq")
    with pytest.raises(DataError, match="lists of one length can be packed"):
        pack(tmp_path / "odd.pq", tmp_path / "odd")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_with_gaps_is_refused(tmp_path: Path, suffix: str) -> None:
    frame = table()
    frame.loc[7, "animal"] = None
    path = tmp_path / f"table.{suffix}"
    frame.to_parquet(path) if suffix == "parquet" else frame.to_csv(path, index=False)
    with pytest.raises(DataError, match=r"column 'animal' of .* has no value in row 7"):
        pack(path, tmp_path / "out")
    with pytest.raises(DataError, match=r"needs column 'colour', .* has number, height, width, animal"):
        pack(path, tmp_path / "out", options=SourceOptions(fields=parse_table_fields("x=colour")))
    assert not (tmp_path / "out").exists()


def test_numpy_files_as_fields_runs_of_samples_and_single_samples(tmp_path: Path) -> None:
    data = np.arange(24, dtype=np.float32).reshape(12, 2)
    for name in ("fields", "runs", "single/a", "single/b"):
        (tmp_path / name).mkdir(parents=True)
    np.save(tmp_path / "fields" / "x.npy", data)
    np.save(tmp_path / "fields" / "y.npy", np.arange(12))
    for number in range(3):
        rows = slice(4 * number, 4 * number + 4)
        np.savez(tmp_path / "runs" / f"{number}.npz", x=data[rows], y=np.arange(12)[rows])
    for number in range(12):
        np.save(tmp_path / "single" / ("a" if number < 5 else "b") / f"{number:02d}.npy", data[number])
    for source in ("npy:fields", "npy:runs"):
        _, found = pack(source.replace(":", f":{tmp_path}/"), tmp_path / "out" / source[4:], shard_bytes=100)
        assert np.array_equal(found["x"], data)
        assert found["y"].tolist() == list(range(12))
    manifest, found = pack(f"npy-files:{tmp_path / 'single'}", tmp_path / "out" / "files")
    assert np.array_equal(found["x"], data)
    assert found["label"].tolist() == [0] * 5 + [1] * 7
    assert manifest.fields["label"].classes == ("a", "b")
    _, found = pack(tmp_path / "fields" / "x.npy", tmp_path / "out" / "one")
    assert np.array_equal(found["x"], data)
    np.save(tmp_path / "single" / "a" / "99.npy", data)
    with pytest.raises(DataError, match=r"99.npy is float32 \(12, 2\), that of .* float32 \(2,\)"):
        pack(f"npy-files:{tmp_path / 'single'}", tmp_path / "out" / "odd")


def test_a_function_of_the_working_directory_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h7_made_samples.py").write_text(
        "def all_of_them():\n    return ({'x': [k, k + 1]} for k in range(9))\n"
        "def in_parts(part, num_parts):\n    return ({'x': k} for k in range(part, 20, num_parts))\n"
        "def with_options(path):\n    return []\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    manifest, found = pack("h7_made_samples:all_of_them", tmp_path / "all", codec=ChunkCodec.GZIP)
    assert manifest.attributes["source"] == "h7_made_samples:all_of_them"
    assert found["x"].tolist() == [[k, k + 1] for k in range(9)]
    options = SourceOptions(num_parts=3)
    manifest, found = pack("h7_made_samples:in_parts", tmp_path / "parts", options=options)
    assert len(manifest.shards) == 3
    assert sorted(found["x"].tolist()) == list(range(20))
    for name, message in (
        ("all_of_them", "takes no arguments part and num_parts"),
        ("with_options", r"\(path\) must take no arguments"),
        ("absent", "cannot be imported"),
    ):
        with pytest.raises(UsageError, match=message):
            pack(f"h7_made_samples:{name}", tmp_path / "out", options=options)


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        ("digits", {"options": SourceOptions(image_size=(2, 2))}, UsageError, "--size is only for images"),
        ("text:.", {"shuffle": True}, UsageError, "--shuffle needs a known number of samples"),
        ("json:dumps", {"held_out": 0.1}, UsageError, "write two functions, and pack each of them"),
        ("digits", {"chunk_samples": 3}, UsageError, "--chunk-samples is for compressed shards"),
        ("images:", {}, UsageError, "has no path after the colon"),
        ("images:nowhere", {}, DataError, "does not exist"),
        ("nowhere.parquet", {}, DataError, "does not exist"),
        ("nowhere.npy", {}, DataError, "does not exist"),
    ],
)
def test_options_and_sources_that_do_not_fit_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        pack(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["x", "x=", "=a", "x=a+", "x=a:complex64", "x=a,x=b"])
def test_fields_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fields"):
        parse_table_fields(text)


def test_sizes_of_pictures() -> None:
    assert parse_image_size("224x320") == (224, 320)
    assert parse_image_size("96") == (96, 96)
    with pytest.raises(UsageError, match="--size 0x4"):
        parse_image_size("0x4")


def test_a_text_longer_than_a_shard_is_read_in_pieces_and_must_not_change(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    long = "".join(f"{n} ä " for n in range(900))
    for name, text in (("a", "short"), ("b", long), ("c", "end")):
        (texts / name).write_text(text, encoding="utf-8")
    (texts / "d").write_bytes("ä".encode()[:1])  # ends within a letter
    manifest, found = pack(f"text:{texts}", tmp_path / "out", held_out=0, window=50, shard_bytes=1000)
    stream = b"short\0" + long.encode() + b"\0end\0"
    assert manifest.attributes["skipped_files"] == 1
    assert len(manifest.shards) > 5
    assert [bytes(window) for window in found["tokens"]] == [
        stream[50 * n : 50 * n + 51] for n in range((len(stream) - 1) // 50)
    ]
    documents = TextDocuments((texts / "a", texts / "b"))
    assert documents.starts[1] == 6
    with (texts / "b").open("a") as file:
        file.write("more")
    with pytest.raises(DataError, match=r"b has \d+ bytes, it had \d+ at the start of packing"):
        documents.read(1, start=3, stop=9)
