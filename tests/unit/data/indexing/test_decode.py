"""Values that attributes and neighbours of a dataset say to mean something else: decoded, named, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.data import (
    Dataset,
    IndexReading,
    Loader,
    OldIndex,
    ValuesWarning,
    decoding_in_words,
    index_files,
    meanings_in_words,
    parse_field_paths,
    read_manifest,
    verify_dataset,
)
from hpctrain.data.reading.dataset import read_column
from hpctrain.errors import DataError, UsageError

NAN = float("nan")
Make = Callable[[h5py.File], object]


def variable(values: Any, dtype: Any = None, *, name: str = "x", **attributes: Any) -> Make:
    def make(file: h5py.File) -> None:
        dataset = file.create_dataset(name, data=np.asarray(values, dtype))
        for key, value in attributes.items():
            dataset.attrs[key.removeprefix("a") if key.startswith("a_") else key] = value

    return make


def indexed(where: Path, make: Make, *, fields: str = "x=/x", **options: Any) -> Dataset:
    path = where / "a.nc"
    if not path.exists():
        with h5py.File(path, "w") as file:
            make(file)
    index_files(where / "out", files=[str(path)], fields=fields, old=OldIndex.REPLACE, **options)
    return Dataset.open(where / "out")


def values(dataset: Dataset, name: str = "x") -> NDArray[Any]:
    return dataset.gather(np.arange(dataset.num_samples))[name]


def with_mask(name: str, mask: Any) -> Make:
    def make(file: h5py.File) -> None:
        file["x"] = np.array([1, 2, 3], np.int32)
        file[name] = np.asarray(mask)

    return make


def nullable(kind: str, stored: Any) -> Make:
    def make(file: h5py.File) -> None:
        group = file.create_group("x")
        group.attrs["encoding-type"] = kind
        group["values"], group["mask"] = np.asarray(stored), np.array([False, True, False])

    return make


def categorical(file: h5py.File) -> None:
    group = file.create_group("x")
    group.attrs["encoding-type"] = "categorical"
    group["codes"] = np.array([1, -1, 0], np.int8)
    group["categories"] = np.array(["a", "b"], dtype=h5py.string_dtype())


def masked_table(file: h5py.File) -> None:
    table = np.zeros(3, [("x", "f4"), ("x.mask", "?")])
    table["x"], table["x.mask"] = [1, 2, 3], [False, True, False]
    file["x"] = table


def unwritten_netcdf(file: h5py.File) -> None:
    """As the netCDF library writes a variable without _FillValue of which a record was never written."""
    file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.2"
    default = np.float32(9.9692099683868690e36)
    dataset = file.create_dataset("x", (3,), "f4", maxshape=(None,), chunks=(1,), fillvalue=default)
    dataset[0], dataset[2] = 1.0, 3.0


def unwritten_with_missing_value(file: h5py.File) -> None:
    """missing_value without _FillValue: the netCDF library still fills what is not written with its default."""
    unwritten_netcdf(file)
    file["x"].attrs["missing_value"] = np.float32(3)


def table_with_fills(file: h5py.File) -> None:
    """As the netCDF library writes compound types: the attributes are compound as well."""
    kind = np.dtype([("x", "i2"), ("y", "f4")])
    file["x"] = np.array([(1, 5), (2, 6), (3, 7)], kind)
    file["x"].attrs["_FillValue"] = np.array((2, 7), kind)
    file["x"].attrs["scale_factor"] = np.array((0.5, 1), [("x", "f8"), ("y", "f8")])


f4, f8, i2 = np.float32, np.float64, np.int16
DECODED: dict[str, tuple[Make, Any, str]] = {
    "scale and offset": (
        variable([100, 200, -32767], i2, scale_factor=0.01, add_offset=273.15, _FillValue=i2(-32767)),
        [274.15, 275.15, NAN], "float64",
    ),
    "float attributes of a short": (
        variable([1, 2], i2, scale_factor=f4(0.1), add_offset=f4(5)),
        np.array([1, 2], f4) * f4(0.1) + f4(5), "float32",
    ),
    "float attributes of an int need double": (
        variable([16777217], np.int32, scale_factor=f4(1), add_offset=f4(0)), [16777217.0], "float64",
    ),
    "integer attributes": (variable([1, 2], i2, scale_factor=i2(10), add_offset=np.int8(3)), [13.0, 23.0], "float64"),
    "attributes of length 1": (
        variable([1, 2], i2, scale_factor=np.array([0.5]), _FillValue=np.array([2], i2)), [0.5, NAN], "float64",
    ),
    "attributes as text": (
        variable([1, 2], i2, scale_factor="0.5", missing_value=b"2"), [0.5, NAN], "float64",
    ),
    "big endian": (
        variable([256, 2], ">i2", scale_factor=np.array(0.5, ">f8"), _FillValue=np.array(2, ">i2")),
        [128.0, NAN], "float64",
    ),
    "only a fill value": (variable([5, -1], i2, _FillValue=i2(-1)), [5.0, NAN], "float32"),
    "an int with a fill value": (variable([5, -1], np.int32, _FillValue=-1), [5.0, NAN], "float64"),
    "several missing values": (
        variable([1, -9, -8, 4], i2, missing_value=np.array([-9, -8], i2), _FillValue=i2(4)),
        [1, NAN, NAN, NAN], "float32",
    ),
    "a missing value of another type": (
        variable([1e20, 2], f4, missing_value=1e20), [NAN, 2], "float32",
    ),
    "a fill value in packed space": (
        variable([0, 10], i2, scale_factor=0.1, add_offset=1.0, _FillValue=i2(10)), [1.0, NAN], "float64",
    ),
    "unsigned": (
        variable([-1, -2, 3], np.int8, a_Unsigned="true", _FillValue=np.int8(-1), scale_factor=0.5),
        [NAN, 127.0, 1.5], "float64",
    ),
    "unsigned without packing": (variable([-1, 1], np.int8, _Unsigned=np.array(["TRUE"], "S")), [255, 1], "uint8"),
    "signed": (variable([255, 1], np.uint8, _Unsigned="false"), [-1, 1], "int8"),
    "unsigned with a range": (
        variable([-1, -56, 3], np.int8, _Unsigned="true", valid_range=np.array([0, -56], np.int8)),
        [NAN, 200.0, 3.0], "float32",
    ),
    "valid_range in packed space": (
        variable([-1, 0, 100, 101], i2, valid_range=np.array([0, 100], i2), scale_factor=0.1),
        [NAN, 0.0, 10.0, NAN], "float64",
    ),
    "valid_range of the unpacked type": (
        variable([-1, 0, 100, 101], i2, valid_range=np.array([0.0, 10.0]), scale_factor=0.1),
        [NAN, 0.0, 10.0, NAN], "float64",
    ),
    "valid_min and valid_max": (
        variable([-1.0, 0.1, 2.0], f4, valid_min=0.0, valid_max=1.0), [NAN, f4(0.1), NAN], "float32",
    ),
    "a limit is rounded as the values are": (variable([0.1], f4, valid_max=0.1), [f4(0.1)], "float32"),
    "a mask": (with_mask("x.mask", [False, True, False]), [1, NAN, 3], "float64"),
    "a mask of bytes": (with_mask("x.mask", np.array([0, 0, 7], np.uint8)), [1, 2, NAN], "float64"),
    "a masked table": (masked_table, [1, NAN, 3], "float32"),
    "a nullable integer": (nullable("nullable-integer", np.array([1, 2, 3])), [1, NAN, 3], "float64"),
    "a nullable boolean": (nullable("nullable-boolean", np.array([True, True, False])), [1, NAN, 0], "float32"),
    "categories": (categorical, [1, NAN, 0], "float32"),
    "records never written": (unwritten_netcdf, [1, NAN, 3], "float32"),
    "records never written, and a missing value": (unwritten_with_missing_value, [1, NAN, NAN], "float32"),
    "attributes of a table": (table_with_fills, [0.5, NAN, 1.5], "float64"),
}  # fmt: skip


@pytest.mark.parametrize("case", DECODED)
def test_values_are_decoded_and_without_being_asked_there_is_one_warning(case: str, tmp_path: Path) -> None:
    make, wanted, dtype = DECODED[case]
    fields = "x=/x:x" if "table" in case else "x=/x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = indexed(tmp_path, make, fields=fields, decode="cf", reading=IndexReading.CONTENT)
    assert dataset.fields["x"].dtype == dtype
    found = values(dataset)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(wanted, dtype))
    assert decoding_in_words(dataset.manifest, "x").startswith("decoded from")
    assert meanings_in_words(dataset.directory, dataset.manifest)["x"]
    assert verify_dataset(tmp_path / "out") == []
    finite = np.array(wanted, f8)[np.isfinite(np.array(wanted, f8))]
    if "x" in dataset.manifest.statistics and len(finite):
        assert dataset.manifest.statistics["x"].max == pytest.approx(finite.max(), rel=1e-6)
    if (inside := dataset.manifest.shards[0].fields["x"].dataset) != "/x":
        fields = f"x={inside}"  # of a group of anndata
    if case == "float attributes of an int need double":
        return  # scale 1 and offset 0: the numbers are the values
    with pytest.warns(ValuesWarning, match="field 'x' is read as stored; .* the file says: ") as warned:
        plain = indexed(tmp_path, make, fields=fields)
    assert len(warned) == 1
    assert plain.manifest.version == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raw = indexed(tmp_path, make, fields=fields, decode="raw")
    np.testing.assert_array_equal(values(raw), values(plain))


PLAIN: dict[str, Make] = {
    "no attributes": variable([1, 2], i2),
    "units": variable([1.0], f4, units="K", long_name="temperature", valid="yes"),
    "a fill value of NaN": variable([1.0, NAN], f4, _FillValue=f4("nan")),
    "a scale of 1": variable([1.0], f8, scale_factor=1.0, add_offset=0.0),
    "another fill value of HDF5": lambda file: file.create_dataset("x", data=[1, 2], fillvalue=-1),
    "a written netCDF variable": lambda file: (
        file.attrs.__setitem__("_NCProperties", "version=2"),
        file.create_dataset("x", data=np.ones(3, f4), fillvalue=f4(9.9692099683868690e36)),
    ),
    "MATLAB": variable([1, 0], np.uint8, MATLAB_class=np.bytes_("logical"), MATLAB_int_decode=1),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_plain_dataset_has_no_line_and_is_the_same_decoded(case: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = indexed(tmp_path, PLAIN[case])
        before = values(stored)
        decoded = indexed(tmp_path, PLAIN[case], decode="cf")
    np.testing.assert_array_equal(values(decoded), before)
    assert decoded.fields["x"].dtype == before.dtype.name


REFUSED: dict[str, tuple[Make, str]] = {
    "two scales": (variable([1], i2, scale_factor=[1.0, 2.0]), "scale_factor is 1, 2: one finite number"),
    "no number": (variable([1], i2, scale_factor="many"), "the attribute scale_factor is not a number"),
    "an empty attribute": (variable([1], i2, _FillValue=h5py.Empty("i2")), "_FillValue"),
    "an infinite scale": (variable([1], i2, scale_factor=np.inf), "one finite number is expected"),
    "a fill value that does not fit": (variable([1], i2, missing_value=-9999.5), "-9999.5.* cannot be stored as int16"),
    "half a range": (variable([1], i2, valid_range=i2(1)), "two numbers are expected"),
    "a strange _Unsigned": (variable([1], np.int8, _Unsigned="perhaps"), "neither true nor false"),
    "a mask of another shape": (with_mask("x.mask", [True]), r"the mask /x.mask has shape \(1,\), not \(3,\)"),
    "an empty MATLAB array": (
        variable([0, 0], np.uint64, MATLAB_empty=np.uint8(1)), "uint64|dimensions of an empty MATLAB array",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_understood_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(DataError, match=message) as error:
        indexed(tmp_path, make, decode="cf")
    assert "a.nc" in str(error.value)


def test_a_number_that_a_table_says_of_no_member_is_warned_about_or_refused(tmp_path: Path) -> None:
    def make(file: h5py.File) -> None:
        file["x"] = np.array([(1, 5)], [("a", "i2"), ("b", "f4")])
        file["x"].attrs["scale_factor"] = 0.5

    with pytest.warns(
        ValuesWarning, match=r"the table has an attribute scale_factor = 0.5.*\(--decode raw reads"
    ):
        assert values(indexed(tmp_path, make, fields="x=/x:a")).tolist() == [1]
    with pytest.raises(
        DataError, match=r"/x of .*a.nc, cannot be decoded: the table has .* which of the members"
    ):
        indexed(tmp_path, make, fields="x=/x:b", decode="cf")


def test_missing_values_become_a_number_or_a_mask(tmp_path: Path) -> None:
    make = variable([3, -1], np.int64, _FillValue=-1)
    dataset = indexed(tmp_path, make, decode="cf", missing=7)
    assert (values(dataset).tolist(), dataset.fields["x"].dtype) == ([3, 7], "int64")
    dataset = indexed(tmp_path, make, decode="cf", missing="mask")
    found = dataset.gather(np.array([1, 0]))
    assert (found["x"].tolist(), found["x.mask"].tolist()) == ([0, 3], [True, False])
    assert list(dataset.fields) == ["x", "x.mask"]
    assert dataset.fields["x.mask"].dtype == "bool"
    (tmp_path / "a.nc").unlink()
    packed = variable([10, -1], i2, _FillValue=i2(-1), scale_factor=0.1)
    assert values(indexed(tmp_path, packed, decode="cf", missing=-1.5)).tolist() == [1.0, -1.5]
    (tmp_path / "a.nc").unlink()
    with pytest.raises(UsageError, match=r"1.5 for missing values cannot be stored as int64"):
        indexed(tmp_path, make, decode="cf", missing=1.5)
    with pytest.raises(UsageError, match="nan, mask or a number"):
        indexed(tmp_path, make, decode="cf", missing="zero")


def test_an_integer_too_large_for_nan_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    make = variable([3, 2**53 + 1, -1], np.int64, _FillValue=-1)
    dataset = indexed(tmp_path, make, decode="cf")
    assert np.isnan(dataset.gather(np.array([2]))["x"][0])
    with pytest.raises(
        DataError, match=r"field 'x' of shard .*a.nc: the value 9007199254740993 is too large"
    ):
        dataset.gather(np.array([1]))
    assert values(indexed(tmp_path, make, decode="cf", missing="mask")).tolist() == [3, 2**53 + 1, 0]


def two_files(where: Path, first: Make, second: Make) -> list[str]:
    paths = []
    for name, make in (("a.nc", first), ("b.nc", second)):
        with h5py.File(where / name, "w") as file:
            make(file)
        paths.append(str(where / name))
    return paths


def test_statistics_of_integers_too_large_for_nan_need_a_number_or_a_mask(tmp_path: Path) -> None:
    make = variable([2**53 + 1, -1], np.int64, _FillValue=np.int64(-1))
    with pytest.raises(DataError, match=r"field 'x', /x of .*a.nc: the value 9007199254740993 is too large"):
        indexed(tmp_path, make, decode="cf", reading=IndexReading.CONTENT)
    found = indexed(tmp_path, make, decode="cf", missing="0", reading=IndexReading.CONTENT)
    assert values(found).tolist() == [2**53 + 1, 0]


def test_each_file_is_decoded_with_its_own_attributes(tmp_path: Path) -> None:
    files = two_files(
        tmp_path,
        variable(np.arange(50), i2, scale_factor=f4(0.5), _FillValue=i2(1)),
        variable(np.arange(50), i2, scale_factor=10.0, add_offset=1.0, _FillValue=i2(2)),
    )
    index_files(tmp_path / "out", files=files, fields="x:cf:-1=/x", reading=IndexReading.CONTENT)
    dataset = Dataset.open(tmp_path / "out")
    wanted = np.concatenate([np.arange(50) * 0.5, np.arange(50) * 10.0 + 1.0])
    wanted[[1, 52]] = -1.0
    order = np.random.default_rng(0).permutation(100)
    np.testing.assert_array_equal(dataset.gather(order)["x"], wanted[order])
    out = np.empty(100, dtype=np.float64)
    assert dataset.gather(order, out={"x": out})["x"] is out
    np.testing.assert_array_equal(out, wanted[order])
    batches = [batch["x"].numpy() for batch in Loader(dataset, global_batch=7, shuffle=False).epoch(0)]
    np.testing.assert_array_equal(np.concatenate(batches), wanted)
    np.testing.assert_array_equal(read_column(dataset, "x"), wanted)
    assert "other files differ" in decoding_in_words(dataset.manifest, "x")
    assert dataset.manifest.statistics["x"].max == 491.0
    with pytest.warns(ValuesWarning, match="and other files say something else"):
        index_files(tmp_path / "out", files=files, fields="x=/x", old=OldIndex.REPLACE)


def test_files_that_contradict_each_other_are_refused_by_name(tmp_path: Path) -> None:
    days = "days since 2000-01-01"
    files = two_files(
        tmp_path,
        variable([1], i2, units=days, scale_factor=0.5),
        variable([1], i2, units="days since 1990-01-01"),
    )
    with pytest.raises(DataError, match=r"units 'days since .*a.nc.*'days since .*b.nc|b.nc.*a.nc"):
        index_files(tmp_path / "out", files=files, fields="x=/x", decode="cf")
    files = two_files(tmp_path, with_mask("x.mask", [0, 1, 0]), with_mask("y", [0, 1, 0]))
    with pytest.raises(DataError, match=r"has a mask in /x of .*a.nc, but none in /x of .*b.nc"):
        index_files(tmp_path / "out", files=files, fields="x=/x", decode="cf")


def test_times_stay_numbers_and_their_units_are_named(tmp_path: Path) -> None:
    make = variable([1.5, 2.5], f8, units="days since 2000-01-01", calendar="noleap")
    with h5py.File(tmp_path / "a.nc", "w") as file:
        make(file)
    found = index_files(tmp_path / "out", files=[str(tmp_path / "a.nc")], fields="x=/x")
    assert "times in 'days since 2000-01-01', calendar noleap" in found.notes[0]
    dataset = indexed(tmp_path, make, decode="cf")
    assert values(dataset).tolist() == [1.5, 2.5]
    assert "calendar noleap" in meanings_in_words(dataset.directory, dataset.manifest)["x"]


def test_chunks_groups_and_whole_files_are_decoded(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        for number in range(3):
            dataset = file.create_dataset(
                f"g{number}/x", data=np.full((2, 3), number, np.int16), chunks=(1, 3), compression="gzip"
            )
            dataset.attrs["add_offset"], dataset.attrs["_FillValue"] = 10.0 * number, np.int16(1)
    index_files(tmp_path / "out", files=[str(tmp_path / "a.nc")], fields="x:cf=/*/x")
    found = values(Dataset.open(tmp_path / "out"))
    np.testing.assert_array_equal(found[:, 0, 0], [0.0, NAN, 22.0])
    assert found.shape == (3, 2, 3)


def test_variable_lengths_and_tokens_are_not_decoded(tmp_path: Path) -> None:
    def make(file: h5py.File) -> None:
        dataset = file.create_dataset("x", (2,), dtype=h5py.vlen_dtype(np.int16))
        dataset[0], dataset[1] = np.array([1, 2], i2), np.array([3], i2)
        dataset.attrs["scale_factor"] = 0.1

    with pytest.raises(DataError, match="cannot be decoded: its samples have variable lengths"):
        indexed(tmp_path, make, decode="cf")


def test_an_older_reader_refuses_a_decoded_dataset_and_reads_any_other(tmp_path: Path) -> None:
    make = variable([1, 2], i2, scale_factor=0.1)
    decoded = indexed(tmp_path, make, decode="cf")
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert decoded.manifest.version == 3
    assert '"packing"' in text
    assert read_manifest(tmp_path / "out") == decoded.manifest
    plain = indexed(tmp_path, make, decode="raw")
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert plain.manifest.version == 2
    assert '"packing"' not in text
    assert '"decoding"' not in text
    assert plain.manifest.fingerprint != decoded.manifest.fingerprint


def test_names_with_colons_and_commas_are_escaped(tmp_path: Path) -> None:
    table = np.zeros(2, [("a:b", "f4"), ("c,d", "i2")])
    table["a:b"], table["c,d"] = [1, 2], [3, 4]

    def make(file: h5py.File) -> None:
        file["p:q"], file["g,h/r"], file["t:u"], file[r"back\slash"] = [5, 6], [7, 8], table, [9, 10]

    fields = r"x=/p\:q,y=/g\,h/r,z=/t\:u:a\:b,w:raw=/t\:u:c\,d,v=/back\\slash"
    dataset = indexed(tmp_path, make, fields=fields)
    found = {name: array.tolist() for name, array in dataset.gather(np.arange(2)).items()}
    assert found == {"x": [5, 6], "y": [7, 8], "z": [1, 2], "w": [3, 4], "v": [9, 10]}
    hint = r"a ':' or ',' that belongs to a name is written"
    for wrong in ("x=/g,h/r", "x=/p:q:r"):
        with pytest.raises(UsageError, match=hint):
            parse_field_paths(wrong)
    with pytest.raises(DataError, match=rf"has no /p; / holds .*p:q.*{hint}"):
        indexed(tmp_path, make, fields="x=/p:q")
    with pytest.raises(DataError, match=hint):
        indexed(tmp_path, make, fields=r"x=/t\:u:a")
    with pytest.raises(DataError, match=r"choose a member, as in x=/t\\:u:c\\,d"):
        indexed(tmp_path, make, fields=r"x=/t\:u")
    with pytest.raises(UsageError, match="decode must be cf or raw, not 'zip'"):
        parse_field_paths("x:zip=/x")
