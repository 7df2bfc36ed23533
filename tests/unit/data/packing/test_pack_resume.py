"""Resumed packing, compressed shards, statistics, documents."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpctrain.data import Dataset, Existing, pack_arrays, read_manifest, verify_dataset
from hpctrain.data.format.manifest_entries import Moments, moments_of
from hpctrain.data.hdf5.filters import ChunkCodec, ShardCompression
from hpctrain.data.packing.pack import PackOptions, pack_documents, pack_iterator
from hpctrain.errors import DataError, UsageError
from tests.token_arrays import TokenArrays


def some_fields(num_samples: int = 100) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "image": random.integers(0, 255, (num_samples, 3, 5, 7), dtype=np.uint8),
        "value": random.random((num_samples, 40), dtype=np.float32),
        "label": np.arange(num_samples),
    }


def digest(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


class Interrupted(Exception):
    pass


def interrupt_at(samples: int) -> Any:
    def progress(done: int, total: int | None) -> None:
        if done >= samples:
            raise Interrupted

    return progress


def test_a_resumed_packing_keeps_whole_shards_and_makes_damaged_ones_again(tmp_path: Path) -> None:
    fields = some_fields()
    pack_arrays(tmp_path / "once", fields, shard_samples=20)
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        pack_arrays(out, fields, shard_samples=20, progress=interrupt_at(60))
    kept, damaged, lost = (out / f"shard-0000{n}.h5" for n in range(3))
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    lost.unlink()
    before = kept.stat().st_mtime_ns
    manifest = pack_arrays(out, fields, shard_samples=20, existing=Existing.RESUME)
    assert kept.stat().st_mtime_ns == before
    assert manifest.statistics["value"].count == 4000
    assert digest(out) == digest(tmp_path / "once")


def test_resuming_keeps_a_finished_dataset_of_the_same_plan_and_refuses_another(tmp_path: Path) -> None:
    manifest = pack_arrays(tmp_path, some_fields(), shard_samples=40)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert pack_arrays(tmp_path, some_fields(), shard_samples=40, existing=Existing.RESUME) == manifest
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(UsageError, match=r"holds another dataset .*samples was 100, now 90"):
        pack_arrays(tmp_path, some_fields(90), shard_samples=40, existing=Existing.RESUME)
    with pytest.raises(UsageError, match=r'attributes was \{\}, now \{"source": "other"\}'):
        pack_iterator(
            tmp_path, lambda part: samples(0, 3), attributes={"source": "other"}, existing=Existing.RESUME
        )


def test_a_packing_is_resumed_only_with_the_same_plan(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        pack_arrays(tmp_path / "a", some_fields(), shard_samples=20, progress=interrupt_at(40))
    with pytest.raises(UsageError, match=r"was packed differently \(shard_samples was 20, now 30"):
        pack_arrays(tmp_path / "a", some_fields(), shard_samples=30, existing=Existing.RESUME)
    (tmp_path / "a" / ".packing.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no packing that can be resumed"):
        pack_arrays(tmp_path / "a", some_fields(), shard_samples=20, existing=Existing.RESUME)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="do not belong to a dataset"):
        pack_arrays(tmp_path / "b", some_fields(), existing=Existing.RESUME)


@pytest.mark.parametrize("codec", list(ChunkCodec))
def test_compressed_shards_are_ordinary_hdf5_and_read_back_the_same(
    tmp_path: Path, codec: ChunkCodec
) -> None:
    import hdf5plugin  # noqa: F401

    fields = some_fields()
    compression = ShardCompression(codec=codec, chunk_samples=7)
    for name in ("a", "b"):
        manifest = pack_arrays(tmp_path / name, fields, shard_samples=30, compression=compression)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    for shard in manifest.shards:
        assert shard.fields["image"].offset is None
        assert shard.fields["label"].offset is not None  # too small to gain
    with h5py.File(tmp_path / "a" / "shard-00000.h5") as file:
        assert file["image"].chunks == (7, 3, 5, 7)
        assert file["value"].shuffle
        assert not file["image"].shuffle
        for name, array in fields.items():
            assert np.array_equal(file[name][:], array[:30])
    order = np.random.default_rng(1).permutation(100)
    found = Dataset.open(tmp_path / "b").gather(order)
    for name, array in fields.items():
        assert np.array_equal(found[name], array[order])
    assert verify_dataset(tmp_path / "b") == []
    path = tmp_path / "b" / "shard-00002.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert {damage.shard for damage in verify_dataset(tmp_path / "b")} == {"shard-00002.h5"}


def test_a_compressed_packing_can_be_resumed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "shard_samples": 30,
        "compression": ShardCompression(codec=ChunkCodec.GZIP, chunk_samples=4),
    }
    pack_arrays(tmp_path / "once", some_fields(), **arguments)
    with pytest.raises(Interrupted):
        pack_arrays(tmp_path / "out", some_fields(), progress=interrupt_at(60), **arguments)
    before = (tmp_path / "out" / "shard-00001.h5").stat().st_mtime_ns
    pack_arrays(tmp_path / "out", some_fields(), existing=Existing.RESUME, **arguments)
    assert (tmp_path / "out" / "shard-00001.h5").stat().st_mtime_ns == before
    assert digest(tmp_path / "out") == digest(tmp_path / "once")


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=30), min_size=1, max_size=5),
    st.sampled_from(["float32", "float64", "int16", "uint8", "bool", "float16"]),
)
def test_moments_of_parts_add_up_to_those_of_the_whole(parts: list[list[float]], dtype: str) -> None:
    arrays = [np.array(part).clip(0, 200).astype(dtype) for part in parts]
    total = sum((moments_of(array) for array in arrays), start=Moments())
    whole = np.concatenate(arrays).astype(np.float64)
    assert total.count == len(whole)
    if not len(whole):
        assert total.statistics() is None
        return
    found = total.statistics()
    assert found is not None
    assert (found.min, found.max) == (whole.min(), whole.max())
    assert math.isclose(found.mean, whole.mean(), rel_tol=1e-12, abs_tol=1e-12)
    assert math.isclose(found.std, whole.std(), rel_tol=1e-9, abs_tol=1e-9)


def test_statistics_keep_their_digits_far_from_zero_and_leave_out_what_is_no_number() -> None:
    values = 1e9 + np.arange(200_000) % 3
    found = moments_of(np.append(values, [np.nan, np.inf])).statistics()
    assert found is not None
    assert found.count == 200_000
    assert found.std == pytest.approx(values.std(), rel=1e-9)
    assert found.max == 1e9 + 2
    assert moments_of(np.full(5, np.nan)).statistics() is None


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 25),
    st.integers(30, 200),
    st.sampled_from(["ignore", "split"]),
)
def test_documents_become_windows_and_their_starts_are_noted(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    window: int,
    stride: int,
    shard_bytes: int,
    boundaries: Any,
) -> None:
    directory = tmp_path_factory.mktemp("documents")
    random = np.random.default_rng(len(lengths))
    documents = [random.integers(1, 250, length, dtype=np.uint8) for length in lengths]
    cut = documents if boundaries == "split" else [np.concatenate(documents)]
    expected = [d[s : s + window + 1] for d in cut for s in range(0, len(d) - window, stride)]

    def pack() -> None:
        pack_documents(
            directory,
            TokenArrays(documents),
            window=window,
            stride=stride,
            boundaries=boundaries,
            options=PackOptions(shard_bytes=shard_bytes),
        )

    if not expected:
        with pytest.raises(DataError, match=f"one window takes {window + 1}"):
            pack()
        return
    pack()
    dataset = Dataset.open(directory)
    assert np.array_equal(dataset.gather(np.arange(dataset.num_samples))["tokens"], np.stack(expected))
    assert dataset.manifest.statistics == {}
    stream = np.concatenate(documents)
    begins = set((np.cumsum(lengths) - lengths).tolist())
    for entry in dataset.manifest.shards:
        with h5py.File(directory / entry.file, locking=False) as file:
            tokens, starts = file["tokens"][:], file["documents"][:]
        places = np.flatnonzero([
            np.array_equal(stream[p : p + len(tokens)], tokens) for p in range(len(stream))
        ])  # fmt: skip
        assert any(
            set((starts + p).tolist()) == {b for b in begins if p <= b < p + len(tokens)} for p in places
        )
    assert verify_dataset(directory) == []


def samples(start: int, stop: int) -> Iterator[dict[str, Any]]:
    for number in range(start, stop):
        yield {"x": np.full((4, 3), number, np.float32), "y": number, "z": number / 2}


def test_an_iterator_is_packed_in_parts_and_its_packing_can_be_resumed(tmp_path: Path) -> None:
    pulled: list[int] = []

    def open_part(part: int) -> Iterator[dict[str, Any]]:
        for sample in samples(*[(0, 25), (25, 25), (25, 60)][part]):
            pulled.append(sample["y"])
            yield sample

    arguments: dict[str, Any] = {"num_parts": 3, "shard_samples": 10}
    manifest = pack_iterator(tmp_path / "once", open_part, **arguments)
    assert [entry.file for entry in manifest.shards[:4]] == [
        "shard-00000-00000.h5", "shard-00000-00001.h5", "shard-00000-00002.h5", "shard-00002-00000.h5",
    ]  # fmt: skip
    assert [entry.samples for entry in manifest.shards] == [10, 10, 5, 10, 10, 10, 5]
    assert {name: spec.dtype for name, spec in manifest.fields.items()} == {
        "x": "float32", "y": "int64", "z": "float64",
    }  # fmt: skip
    found = Dataset.open(tmp_path / "once").gather(np.arange(60))
    assert found["y"].tolist() == list(range(60))
    assert np.array_equal(found["x"][:, 2, 1], found["y"])
    with pytest.raises(Interrupted):
        pack_iterator(tmp_path / "out", open_part, progress=interrupt_at(35), **arguments)
    pack_iterator(tmp_path / "out", open_part, existing=Existing.RESUME, **arguments)
    assert digest(tmp_path / "out") == digest(tmp_path / "once")


def failing() -> Iterator[dict[str, Any]]:
    yield {"x": 1}
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ([], "yields no samples"),
        (
            [{"x": 1}, {"x": [1, 2]}],
            r"at sample 2 of part 0 .*field 'x' is int64 \(2,\), in the first sample int64",
        ),
        ([{"x": 1}, {"y": 1}], "the fields are y; the first sample had x"),
        ([{"x": "a word"}], "field 'x' has dtype <U6"),
        ([[1, 2]], "yields list, not a dict"),
        (failing(), "at sample 1 of part 0 of the iterator it raised KeyError: 'lost'"),
    ],
)
def test_samples_that_make_no_dataset_are_refused(tmp_path: Path, yielded: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack_iterator(tmp_path, lambda part: iter(yielded))
    with pytest.raises(DataError, match="no dataset"):
        read_manifest(tmp_path)


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = Path(__file__).resolve().parents[4] / "docs" / "guides" / "data-packing.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(guide), "exec"), names)
    found = names["statistics"]
    assert f"# {found.mean:.3f} {found.std:.3f}\n" in blocks[-1]
