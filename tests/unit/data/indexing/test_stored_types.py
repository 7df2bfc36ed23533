"""HDF5 types that are not numpy's: converted by HDF5, or refused by name; the other columns of a table can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tables
from h5py import h5d, h5p, h5s, h5t
from numpy.typing import NDArray

from hpctrain.data import Dataset, IndexReading, index_files, verify_dataset
from hpctrain.data.hdf5.layout import has_numpys_bytes
from hpctrain.errors import DataError


def integer(base: h5t.TypeIntegerID, precision: int, offset: int = 0) -> h5t.TypeIntegerID:
    kind = base.copy()
    kind.set_precision(precision)
    kind.set_offset(offset)
    return kind


def small_float(bits: int, exponent: int, mantissa: int, bias: int) -> h5t.TypeFloatID:
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(bits - 1, mantissa, exponent, 0, mantissa)
    kind.set_size(bits // 8)
    kind.set_ebias(bias)
    return kind


def boolean(base: h5t.TypeIntegerID) -> h5t.TypeEnumID:
    kind = h5t.enum_create(base)
    kind.enum_insert(b"FALSE", 0)
    kind.enum_insert(b"TRUE", 1)
    return kind


SIGNED, FLOATS = np.array([1, -2, 2047, -2048, 7, 0]), np.array([1.5, -2, 3.5, 7, 0, -0.5])
CONVERTED: dict[str, tuple[h5t.TypeID, NDArray[Any]]] = {
    "12 bits": (integer(h5t.STD_I16LE, 12), SIGNED.astype("i2")),
    "12 bits, big-endian": (integer(h5t.STD_I16BE, 12), SIGNED.astype("i2")),
    "12 bits in 4 bytes": (integer(h5t.STD_I32LE, 12, 9), SIGNED.astype("i4")),
    "shifted": (integer(h5t.STD_U16LE, 12, 4), np.arange(6, dtype="u2") * 100),
    "one bit": (integer(h5t.STD_U8LE, 1, 7), np.array([0, 1, 1, 0, 1, 0], "u1")),
    "bfloat16": (small_float(16, 8, 7, 127), FLOATS.astype("f4")),
    "float8 e4m3": (small_float(8, 4, 3, 7), FLOATS.astype("f4")),
    "float8 e5m2": (small_float(8, 5, 2, 15), FLOATS.astype("f4")),
    "another bias": (small_float(32, 8, 23, 120), FLOATS.astype("f4")),
    "bool of 4 bytes": (boolean(h5t.STD_I32LE), np.array([0, 1, 1, 0, 1, 0], "i4")),
    "bool of 2 bytes, big-endian": (boolean(h5t.STD_U16BE), np.array([0, 1, 1, 0, 1, 0], ">u2")),
}
AS_THEY_ARE: dict[str, tuple[h5t.TypeID, NDArray[Any]]] = {
    "bool": (boolean(h5t.STD_I8LE), np.array([0, 1, 1, 0, 1, 0], "i1")),
    "big-endian": (h5t.IEEE_F64BE, FLOATS.astype(">f8")),
    "one byte, big-endian": (h5t.STD_U8BE, np.arange(6, dtype="u1")),
    "bit field": (h5t.STD_B16LE, np.arange(6, dtype="u2")),
    "half": (h5t.IEEE_F16LE, FLOATS.astype("f2")),
}


def write(file: h5py.File, name: str, kind: h5t.TypeID, values: NDArray[Any], *, chunked: bool) -> None:
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunked:
        plist.set_chunk((4,))
        plist.set_deflate(1)
    made = h5d.create(file.id, name.encode(), kind, h5s.create_simple(values.shape), plist)
    is_raw = isinstance(kind, h5t.TypeEnumID | h5t.TypeBitfieldID)
    made.write(h5s.ALL, h5s.ALL, values, kind if is_raw else h5t.py_create(values.dtype))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", [*CONVERTED, *AS_THEY_ARE])
def test_numbers_are_read_as_h5py_reads_them(tmp_path: Path, name: str, chunked: bool) -> None:
    kind, values = {**CONVERTED, **AS_THEY_ARE}[name]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file, "x", kind, values, chunked=chunked)
    with h5py.File(tmp_path / "a.h5") as file:
        assert has_numpys_bytes(file["x"].id.get_type(), file["x"].dtype) == (name in AS_THEY_ARE)
        wanted = file["x"][...]
    assert np.array_equal(wanted, values)
    index_files(tmp_path / "out", files=[str(tmp_path / "a.h5")], fields="x=/x", reading=IndexReading.CONTENT)
    dataset = Dataset.open(tmp_path / "out")
    assert np.array_equal(dataset.gather(np.array([5, 0, 3, 0]))["x"], wanted[[5, 0, 3, 0]])
    assert not verify_dataset(tmp_path / "out")
    assert (dataset.manifest.shards[0].fields["x"].offset is None) == (chunked or name in CONVERTED)


def test_types_that_numpy_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    three_bytes = h5t.STD_I32LE.copy()
    three_bytes.set_precision(24)
    three_bytes.set_size(3)
    unnormalised = h5t.IEEE_F32LE.copy()
    unnormalised.set_norm(h5t.NORM_MSBSET)
    vlen = h5t.vlen_create(integer(h5t.STD_I16LE, 12))
    with h5py.File(path, "w") as file:
        for name, kind in {
            "i24": three_bytes,
            "time": h5t.UNIX_D64LE,
            "norm": unnormalised,
            "vlen": vlen,
        }.items():
            h5d.create(file.id, name.encode(), kind, h5s.create_simple((4,)))
        file["other"] = np.arange(4)
    for name, said in {
        "i24": "holds integers of 3 bytes, for which numpy has no dtype",
        "time": r"holds times \(H5T_TIME\) of 8 bytes, for which numpy has no dtype",
        "norm": "holds floats of 4 bytes that HDF5 cannot convert to float32",
        "vlen": "has variable lengths of integers of 2 bytes that are not numpy's int16",
    }.items():
        with pytest.raises(DataError, match=f"field 'x', /{name} of {path}, {said}"):
            index_files(tmp_path / "out", files=[str(path)], fields=f"x=/{name}")
    index_files(tmp_path / "out", files=[str(path)], fields="x=/other")
    assert Dataset.open(tmp_path / "out").gather(np.arange(4))["x"].tolist() == [0, 1, 2, 3]


def test_the_other_columns_of_a_table_with_times(tmp_path: Path) -> None:
    path, columns = tmp_path / "a.h5", {"a": tables.Float32Col(pos=0), "when": tables.Time64Col(pos=1)}
    with tables.open_file(path, "w") as file:
        table = file.create_table("/", "table", {**columns, "n": tables.UInt8Col(shape=(2,), pos=2)})
        table.append([(1.5, 1.7e9, (1, 2)), (2.5, 1.7e9, (3, 4))])
    index_files(
        tmp_path / "out", files=[str(path)], fields="a=/table:a,n=/table:n", reading=IndexReading.CONTENT
    )
    batch = Dataset.open(tmp_path / "out").gather(np.array([1, 0]))
    assert batch["a"].tolist() == [2.5, 1.5]
    assert batch["n"].tolist() == [[3, 4], [1, 2]]
    assert not verify_dataset(tmp_path / "out")
    with pytest.raises(
        DataError, match=r"member 'when' of times \(H5T_TIME\) of 8 bytes.*other members can be"
    ):
        index_files(tmp_path / "when", files=[str(path)], fields="x=/table:when")
    with pytest.raises(DataError, match=r"is a table \(compound\) of a, when, n: choose a member"):
        index_files(tmp_path / "all", files=[str(path)], fields="x=/table")


@pytest.mark.parametrize("gzip", [None, 1])
def test_what_the_scale_offset_filter_does_to_nan_is_said(tmp_path: Path, gzip: int | None) -> None:
    values = np.linspace(0, 9, 40, dtype=np.float32).reshape(4, 10)
    lost = values.copy()
    lost[2, 0] = np.nan
    options: dict[str, Any] = {"chunks": (1, 10), "scaleoffset": 2, "compression": gzip and "gzip"}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("kept", data=values, **options)
        file.create_dataset("lost", data=lost, **options)
        file.create_dataset("whole numbers", data=values.astype(int), chunks=(1, 10), scaleoffset=0)
    files = [str(tmp_path / "a.h5")]
    (note,) = index_files(tmp_path / "1", files=files, fields="x=/kept").notes
    assert "field 'x', /kept" in note
    assert "does not keep NaN" in note
    with pytest.raises(DataError, match=r"/lost of .* has lost numbers: its chunk at row 2 began with NaN"):
        index_files(tmp_path / "2", files=files, fields="x=/lost")
    assert index_files(tmp_path / "3", files=files, fields="x=/whole numbers").notes == ()
