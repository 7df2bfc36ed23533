"""Attributes and neighbours of other conventions than CF that say what numbers mean: named, refused when decoded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z

from hpctrain.data import IndexReading, ValuesWarning, meanings_in_words
from hpctrain.errors import DataError
from tests.unit.data.indexing.test_decode import indexed, values, variable

i2, f4 = np.int16, np.float32
Make = Callable[[h5py.File], object]


def named(**attributes: Any) -> Make:
    return variable([1, 2, 3], i2, **attributes)


def nexus(*, group: str = "NXdata", **neighbours: float) -> Make:
    """A signal /x in the root group, which NeXus does not forbid, with datasets next to it."""

    def make(file: h5py.File) -> None:
        file.attrs["NX_class"], file.attrs["signal"] = group, "x"
        file["x"] = np.array([1, 2, 3], i2)
        for name, value in neighbours.items():
            file[name] = value

    return make


def nexus_group(file: h5py.File) -> None:
    """Below the root, and no attributes but those of the group."""
    file.create_group("entry/data").attrs["NX_class"] = "NXdata"
    file["entry/data/counts"], file["entry/data/counts_scaling_factor"] = np.array([1, 2], i2), 0.5
    file["x"] = h5py.SoftLink("/entry/data/counts")


def odim(place: str, **attributes: float) -> Make:
    def make(file: h5py.File) -> None:
        file["dataset1/data1/data"] = np.array([1, 2, 3], np.uint8)
        file["x"] = h5py.SoftLink("/dataset1/data1/data")
        for name, value in attributes.items():
            file.require_group(place).attrs[name] = value

    return make


def pandas_time(file: h5py.File) -> None:
    file["x"] = np.array([1, 2, 3])
    file["x"].attrs["value_type"] = np.bytes_("datetime64[ns]")


def only_a_dimension(file: h5py.File) -> None:
    file["x"] = np.zeros(3, ">f4")
    file["x"].make_scale("This is a netCDF dimension but not a netCDF variable.         3")


def channels(*factors: float) -> Make:
    def make(file: h5py.File) -> None:
        file["es/data"], file["es/channel_conversion"] = np.array([1, 2], i2), factors
        file["es/data"].attrs["conversion"] = 1.0
        file["x"] = h5py.SoftLink("/es/data")

    return make


def masked_strings(name: str) -> Make:
    def make(file: h5py.File) -> None:
        file["x"] = np.array(["a", "", "b"], h5py.string_dtype())
        file[name] = np.array([False, True, False])

    return make


def table(**attributes: Any) -> Make:
    def make(file: h5py.File) -> None:
        file["x"] = np.array([(1, 5), (2, 6)], [("x", "i2"), ("y", "f4")])
        for name, value in attributes.items():
            file["x"].attrs[name] = value

    return make


WARNED: dict[str, tuple[Make, str]] = {
    "OMI": (
        variable([1, 2], f4, ScaleFactor=2.0, Offset=1.0, MissingValue=f4(-1e30)),
        r"MissingValue = -1e\+30; Offset = 1; ScaleFactor = 2",
    ),
    "a scale in text": (named(ScaleFactor="0.01"), "ScaleFactor = 0.01"),
    "a scale for each band": (named(Scale_Factors=1, scaleFactor=[1.0, 0.1]), "scaleFactor = 1, 0.1"),
    "NeXus as attributes": (named(scaling_factor=0.1, offset=5.0), "offset = 5; scaling_factor = 0.1"),
    "ocean colour": (variable([1.0], f4, slope=0.1, intercept=2.0), "intercept = 2; slope = 0.1"),
    "a slope of integers": (named(slope=0.1), "slope = 0.1"),
    "a scale of integers": (named(Scale=np.array([0.1])), "Scale = 0.1"),
    "openPMD": (variable([1.0], f4, unitSI=1e9, unitDimension=np.zeros(7)), r"unitSI = 1e\+09"),
    "NWB": (named(conversion=1e-6, offset=0.0, resolution=-1.0), "conversion = 1e-06"),
    "NWB with an offset": (named(conversion=1.0, offset=3.0), "offset = 3"),
    "units_factor": (variable([1.0], f4, units_factor=1000.0), "units_factor = 1000"),
    "FITS": (named(BSCALE=1.0, BZERO=32768.0, BLANK=-1), "BLANK = -1; BZERO = 32768"),
    "fill_value": (named(fill_value=-1), "fill_value = -1"),
    "FillValue next to another _FillValue": (named(FillValue=-1, _FillValue=i2(-2)), "FillValue = -1"),
    "ValidRange": (named(ValidRange=[0, 100]), "ValidRange = 0, 100"),
    "a missing value of zero": (named(nodata=0), "nodata = 0"),
    "NeXus, of a field": (
        nexus(x_scaling_factor=0.5, x_offset=2.0), r"/x_scaling_factor = 0.5 \(NeXus: .*x_offset = 2",
    ),
    "NeXus, in a group": (nexus_group, "/entry/data/counts_scaling_factor = 0.5"),
    "NeXus, only an offset": (nexus(x_offset=2.0), "/x_offset = 2"),
    "NeXus, of the signal": (nexus(scaling_factor=0.5), "/scaling_factor = 0.5"),
    "ODIM": (odim("dataset1/data1/what", gain=0.5, offset=-32.0, nodata=255.0), "gain = 0.5 .*nodata = 255 .*what"),
    "ODIM, of a level above": (odim("what", gain=0.5, offset=0.0), "gain = 0.5"),
    "times of pandas": (pandas_time, r"datetime64\[ns\] of pandas"),
    "strings with a mask": (masked_strings("x.mask"), "a mask of missing values, /x.mask"),
    "a dimension of netCDF": (only_a_dimension, "a dimension of netCDF, not a variable"),
    "NWB, for each channel": (channels(1.0, 2.0), r"/es/channel_conversion \(NWB\)"),
    "a table": (table(scaleFactor=0.1), "scaleFactor = 0.1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_they_are_named_once_and_not_decoded(case: str, tmp_path: Path) -> None:
    make, said = WARNED[case]
    fields = "x=/x:x" if case == "a table" else "x=/x"
    with pytest.warns(
        ValuesWarning, match=rf"field 'x' is read as stored; of /\S+ of .*{said}.*--decode raw"
    ) as warned:
        plain = indexed(tmp_path, make, fields=fields)
    assert len(warned) == 1
    if plain.fields["x"].kind != "classes":
        assert meanings_in_words(plain.directory, plain.manifest)["x"]
    with pytest.raises(DataError, match=r"field 'x', /\S+ of .*a.nc, cannot be decoded: .*--decode raw"):
        indexed(tmp_path, make, fields=fields, decode="cf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raw = indexed(tmp_path, make, fields=fields, decode="raw")
    np.testing.assert_array_equal(values(raw), values(plain))


PLAIN: dict[str, Make] = {
    "no scale, no offset": named(ScaleFactor=1.0, Offset=0.0, unitSI=1.0, conversion=1, slope=1.0, intercept=0.0),
    "an offset without a scale": named(offset=128, Offset=7),
    "a missing value that cannot be": variable([1], np.uint8, MissingValue=-9999.0, fill_value=np.nan),
    "words": named(scale="linear", offset="none", conversion="counts to volts", gain="high", scaleFactor="see paper"),
    "sizes of pixels": variable([1.0], f4, scale=0.65),
    "a scale for each axis": named(scale=[1.0, 0.5, 0.5]),
    "gain of a camera": named(gain=2.5),
    "an offset of something else": lambda file: (
        file.__setitem__("x", np.array([1, 2], i2)), file.__setitem__("x_offset", [0, 7]),
        file.__setitem__("x_scaling_factor", 2.0),
        file.__setitem__("offset", [0, 7]), file.__setitem__("scaling_factor", 2.0),
    ),
    "axes of NeXus": nexus(scaling_factor=1.0, x_scaling_factor=1.0, offset=0.0),
    "NWB, the same for each channel": channels(1.0, 1.0),
    "a group what without a scale": odim("what", nodata=255.0),
    "a table with a scale": table(scale=0.1, offset=5.0),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_what_says_nothing_of_the_numbers_has_no_line(case: str, tmp_path: Path) -> None:
    fields = "x=/x:x" if case.startswith("a table") else "x=/x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = values(indexed(tmp_path, PLAIN[case], fields=fields))
        decoded = values(indexed(tmp_path, PLAIN[case], fields=fields, decode="cf"))
    np.testing.assert_array_equal(stored, decoded)


def test_what_attributes_of_cf_say_too_is_decoded(tmp_path: Path) -> None:
    """OMI writes each twice."""
    make = variable(
        [1, -5, 3],
        i2,
        ScaleFactor=f4(0.1),
        scale_factor=0.1,
        MissingValue=i2(-5),
        _FillValue=i2(-5),
        Offset=0.0,
    )
    found = values(indexed(tmp_path, make, decode="cf"))
    np.testing.assert_array_equal(found, [1 * 0.1, np.nan, 3 * 0.1])


def netcdf(stored: Any, dtype: str) -> Make:
    """As the netCDF library writes integers without _FillValue."""
    default = {"int64": -9223372036854775806, "int32": -2147483647, "uint16": 65535}[dtype]

    def make(file: h5py.File) -> None:
        file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.2"
        file.create_dataset("x", data=np.array(stored, dtype), fillvalue=default)

    return make


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_integers_of_netcdf_stay_integers_until_a_record_that_was_never_written_is_read(
    dtype: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = indexed(tmp_path, netcdf([3, 2, 1, 0], dtype), decode="cf")
    assert (dataset.fields["x"].dtype, values(dataset).tolist()) == (dtype, [3, 2, 1, 0])
    floats = indexed(tmp_path, netcdf([], dtype), decode="cf", missing="nan")
    assert floats.fields["x"].dtype == ("float32" if dtype == "uint16" else "float64")
    (tmp_path / "a.nc").unlink()
    default = {"int64": -9223372036854775806, "int32": -2147483647, "uint16": 65535}[dtype]
    hidden = netcdf([3, default, 5, 6, 1], dtype)  # neither the first, nor the middle, nor the last
    dataset = indexed(tmp_path, hidden, decode="cf")
    assert dataset.gather(np.array([0, 4]))["x"].tolist() == [3, 1]
    with pytest.raises(
        DataError, match=rf"field 'x' of shard .*a.nc: {default} is what netCDF leaves in a record"
    ):
        values(dataset)
    with pytest.raises(DataError, match=rf"field 'x', /x of .*a.nc: {default} is what netCDF leaves"):
        indexed(tmp_path, hidden, decode="cf", reading=IndexReading.CONTENT)
    assert np.isnan(values(indexed(tmp_path, hidden, decode="cf", missing="nan"))[1])
    assert values(indexed(tmp_path, hidden, decode="cf", missing=9)).tolist() == [3, 9, 5, 6, 1]
    (tmp_path / "a.nc").unlink()
    dataset = indexed(tmp_path, netcdf([3, default], dtype), decode="cf")  # seen when it was indexed
    assert np.isnan(values(dataset)[1])


def test_variable_lengths_of_netcdf_have_no_default_fill(tmp_path: Path) -> None:
    def make(file: h5py.File) -> None:
        file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.2"
        file.create_dataset("x", (2,), h5py.vlen_dtype("i4"))
        file["x"][0], file["x"][1] = [1, 2], [3]

    dataset = indexed(tmp_path, make)
    assert dataset.gather(np.arange(2))["x"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("order", [("shuffle", "n-bit", "gzip"), ("shuffle", "n-bit")])
def test_n_bit_behind_another_filter_is_refused(order: tuple[str, ...], tmp_path: Path) -> None:
    """HDF5 loses bits, or reads other numbers each time."""

    def make(file: h5py.File) -> None:
        plist = h5p.create(h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        for name in order:
            {
                "shuffle": plist.set_shuffle, "gzip": lambda: plist.set_deflate(4), "fletcher32": plist.set_fletcher32,
                "n-bit": lambda: plist.set_filter(h5z.FILTER_NBIT, h5z.FLAG_OPTIONAL),
            }[name]()  # fmt: skip
        h5d.create(file.id, b"x", h5t.NATIVE_INT32, h5s.create_simple((8,)), plist)
        file["x"][...] = np.arange(8)

    with pytest.raises(
        DataError, match=r"field 'x', /x of .*a.nc, is stored with HDF5's n-bit filter behind"
    ):
        indexed(tmp_path, make)
