from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data.indexing.index_files import TokenRequest, index_files
from hpctrain.data.indexing.request import SampleIs, parse_field_paths
from hpctrain.errors import DataError, UsageError

Make = Callable[[h5py.File], object]


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "i4")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    file.create_virtual_dataset("x", layout)


def external_storage(file: h5py.File) -> None:
    file.create_dataset("x", (4,), "i4", external=[("raw.bin", 0, 16)])


def two_lengths(file: h5py.File) -> None:
    file["x"], file["y"] = np.zeros(4), np.zeros(5)


def references(file: h5py.File) -> None:
    file["x"] = np.array([file.ref], dtype=h5py.ref_dtype)


def circle(file: h5py.File) -> None:
    file["x"], file["y"] = h5py.SoftLink("/y"), h5py.SoftLink("/x")


def pickled(file: h5py.File) -> None:
    file.create_dataset("x", (1,), h5py.vlen_dtype(np.uint8)).attrs["PSEUDOATOM"] = np.bytes_(b"object")


def rows_beside_references(file: h5py.File, *, written: int, chunk: int | None = 4) -> None:
    """A table of 32 rows with a reference, of which the first `written` are written, and which has no fill value."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if chunk is not None:
        plist.set_chunk((chunk,))
    dtype = np.dtype([("of", h5py.ref_dtype), ("b", "<f8")])
    kind = h5py.h5t.py_create(dtype, logical=True)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((32,)), plist)
    rows = np.zeros(written, dtype)
    rows["of"], rows["b"] = file.ref, np.arange(written)
    if written:
        file["x"][:written] = rows


TABLE = np.zeros(3, [("a", "i4"), ("b", "f4")])

REFUSED: list[tuple[Make, str, str]] = [
    (lambda f: f.create_group("g"), "x=/g/x", r"has no /g/x; /g holds nothing"),
    (lambda f: f.create_dataset("y", data=[1]), "x=/x", r"has no /x; / holds y"),
    (lambda f: f.create_group("x/y"), "x=/x", r"is a group, not a dataset; it holds y"),
    (lambda f: f.create_dataset("x", dtype="f4", shape=None), "x=/x", r"is empty: it has no elements"),
    (
        lambda f: f.create_dataset("x", (0, 3), "f4"),
        "x=/x",
        r"is empty, its shape is \(0, 3\): leave the file out",
    ),
    (
        lambda f: f.create_dataset("x", data=5),
        "x=/x",
        r"is one number, not one row per sample: --samples file",
    ),
    (two_lengths, "x=/x,y=/y", r"same number of samples: x has 4, y has 5"),
    (
        lambda f: f.create_dataset("x", data=TABLE),
        "x=/x",
        r"table \(compound\) of a, b: choose a member.*x=/x:b",
    ),
    (lambda f: f.create_dataset("x", data=TABLE), "x=/x:c", r"no member 'c'; its members are a, b"),
    (lambda f: f.create_dataset("x", data=[1]), "x=/x:c", r"is not a table \(compound\): leave out ':c'"),
    (references, "x=/x", r"holds references to objects"),
    (lambda f: rows_beside_references(f, written=28), "x=/x:b", r"rows that were never written, and no fill"),
    (lambda f: rows_beside_references(f, written=0, chunk=None), "x=/x:b", r"values of other rows for them"),
    (pickled, "x=/x", r"holds pickled Python objects"),
    (lambda f: f.create_dataset("x", data=[1j]), "x=/x", r"is complex128; possible are bool"),
    (lambda f: f.create_dataset("x", data=np.uint64([1])), "x=/x", r"is uint64; possible are bool"),
    (lambda f: f.create_dataset("x", data=[["a", "b"]]), "x=/x", r"has \(2,\) strings per sample"),
    (lambda f: f.create_dataset("x", data=np.array([b"\xff"])), "x=/x", r"strings that are not UTF-8"),
    (lambda f: f.create_dataset("x", (2,), h5py.vlen_dtype("i4")), "x=/x", r"2 samples, which are all empty"),
    (lambda f: f.create_dataset("x", (2,), h5py.vlen_dtype(">i4")), "x=/x", r"in the other byte order"),
    (virtual, "x=/x", r"is virtual, its data are in other files"),
    (external_storage, "x=/x", r"keeps its data in another file"),
    (circle, "x=/x", r"is a cycle of soft links"),
    (
        lambda f: f.update(x=h5py.ExternalLink("b.h5", "/x")),
        "x=/x",
        r"link to another file, b.h5: index that",
    ),
    (lambda f: f.update(g=h5py.ExternalLink("b.h5", "/")), "x=/g/x", r"/g/x of .* is a link to another file"),
    (lambda f: f.update(g=h5py.ExternalLink("b.h5", "/")), "x=/*/x", r"/g of .* is a link to another file"),
    (lambda f: f.create_dataset("a/x", data=[1]), "x=/*/x,y=/*/y", r"has no /a/y; /a holds x"),
    (lambda f: f.create_dataset("a/x", data=[1]), "x=/*/x,y=/*/x/*", r"do not match the same groups"),
    (lambda f: f.create_dataset("x", data=[1]), "x=/*/x", r"holds nothing that matches /\*/x"),
]


@pytest.mark.parametrize(("make", "fields", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_read_is_refused_in_plain_words(
    make: Make, fields: str, message: str, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        make(file)
    with pytest.raises(DataError, match=message) as error:
        index_files(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields=fields)
    assert "a.h5" in str(error.value)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f8"), "is float32 in .*a.h5, but float64 in /x of .*b.h5"),
        (np.zeros((2, 3)), np.zeros((2, 4)), r"have shape \(3,\) in .*a.h5, but \(4,\) in /x of .*b.h5"),
        (np.zeros(2), np.array([b"a", b"b"]), "is float64 in .*a.h5, but strings in /x of .*b.h5"),
    ],
)
def test_files_that_differ_are_named(
    first: np.ndarray, second: np.ndarray, message: str, tmp_path: Path
) -> None:
    for name, data in (("a", first), ("b", second)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = data
    with pytest.raises(DataError, match=message):
        index_files(tmp_path / "index", files=[str(tmp_path)], fields="x=x")


def test_files_that_are_no_whole_hdf5_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(b"no HDF5 at all" * 99)
    with pytest.raises(DataError, match=r"a.h5 cannot be read as HDF5"):
        index_files(tmp_path / "index", files=[str(path)], fields="x=x")
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(9999)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"a.h5 cannot be read as HDF5: .*truncated"):
        index_files(tmp_path / "index", files=[str(path)], fields="x=x")


WRITER = """
import sys, h5py
file = h5py.File(sys.argv[1], "w", libver=sys.argv[2])
file["x"] = [1, 2, 3]
file.flush()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_file_that_someone_is_writing_is_refused_until_it_is_closed(libver: str, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    command = [sys.executable, "-c", WRITER, str(path), libver]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(DataError, match=r"a.h5 is open for writing by another program"):
            index_files(tmp_path / "index", files=[str(path)], fields="x=x")
        writer.stdin.close()
    assert index_files(tmp_path / "index", files=[str(path)], fields="x=x").manifest.samples == 3


def test_what_a_crashed_writer_left_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    command = [sys.executable, "-c", WRITER, str(path), "latest"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        writer.kill()
    with pytest.raises(DataError, match=r"a.h5 is open for writing .*or was left so .*h5clear -s"):
        index_files(tmp_path / "index", files=[str(path)], fields="x=x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("", "--fields is empty"),
        ("images", "NAME=/PATH or NAME=/PATH:MEMBER is expected"),
        ("x=/a:", "NAME=/PATH or NAME=/PATH:MEMBER is expected"),
        ("x=/a,x=/b", "names a field twice"),
        ("a/b=/a", "a name has letters"),
        ("x=/*/a,y=/b", "either all paths of --fields have a"),
    ],
)
def test_fields_that_make_no_sense_are_usage_errors(fields: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        index_files(tmp_path / "index", files=[str(tmp_path)], fields=fields)


def test_samples_and_padding_that_do_not_fit_the_fields_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((5, 2))
        file["lists"] = np.array([[1, 2], [3, 4]])
        file["tokens"], file["late"] = np.arange(9), np.array([3, 99])
        file.create_dataset("v", (1,), h5py.vlen_dtype("i4"))[0] = [1, 2]
    out, files = tmp_path / "index", [str(tmp_path)]
    with pytest.raises(UsageError, match=r"--samples groups needs paths with a '\*'"):
        index_files(out, files=files, fields="x=x", samples=SampleIs.GROUPS)
    with pytest.raises(UsageError, match=r"--samples file means one sample per file"):
        index_files(out, files=files, fields="x=/*", samples=SampleIs.FILE)
    with pytest.raises(UsageError, match=r"--pad y: there is no such field; the fields are x"):
        parse_field_paths("x=x", padded=["y"])
    with pytest.raises(DataError, match=r"--pad x: only datasets that are one sample each"):
        index_files(out, files=files, fields=parse_field_paths("x=x", padded=["x"]))
    with pytest.raises(DataError, match=r"has variable lengths: its rows are samples"):
        index_files(out, files=files, fields="x=v", samples=SampleIs.FILE)
    request = TokenRequest(window=4, stride=4)
    with pytest.raises(UsageError, match=r"--tokens needs exactly one field, named tokens"):
        index_files(out, files=files, fields="x=x", tokens=request)
    with pytest.raises(DataError, match=r"rows of shape \(2,\), not a stream of integers"):
        index_files(out, files=files, fields="tokens=lists", tokens=request)
    with pytest.raises(DataError, match=r"no file has a window of 100 tokens"):
        index_files(out, files=files, fields="tokens=tokens", tokens=TokenRequest(window=99, stride=1))
    request = TokenRequest(window=4, stride=4, documents="late")
    with pytest.raises(DataError, match=r"late of .* must hold the positions at which documents begin"):
        index_files(out, files=files, fields="tokens=tokens", tokens=request)


def test_an_index_does_not_replace_a_packed_dataset(tmp_path: Path) -> None:
    from hpctrain.data import pack_arrays

    pack_arrays(tmp_path / "packed", {"x": np.zeros((3, 2))})
    with pytest.raises(UsageError, match="holds a packed dataset: index into another directory"):
        index_files(tmp_path / "packed", files=[str(tmp_path / "packed")], fields="x=x")


FOREIGN = {
    "a.nc": (b"CDF\x02" + bytes(40), "is a netCDF-3 file .*nccopy -k nc4"),
    "b.bp": (b"\0" * 40, "is an ADIOS2 BP file"),
    "md.idx": (b"ADIOS-BP v2.9.1 Index Table", "is a part of an ADIOS2 BP file"),
    "c.h5": (b"", "is empty"),
    "d.mat": (b"MATLAB 5.0 MAT-file, Platform", "is a MATLAB file before version 7.3"),
    "e.h5": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    "f.h5": (b"\x1f\x8b" + bytes(40), "is compressed by gzip as a whole"),
    "g.h5": (b"anything else", "cannot be read as HDF5"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_formats_are_named(tmp_path: Path, name: str) -> None:
    content, said = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} {said}"):
        index_files(tmp_path / "out", files=[str(tmp_path / name)], fields="x=/x")


def test_directories_that_are_one_dataset_are_named(tmp_path: Path) -> None:
    for marker, said in {"md.idx": "an ADIOS2 BP directory", "zarr.json": "a Zarr directory"}.items():
        (tmp_path / marker).mkdir()
        (tmp_path / marker / marker).write_bytes(b"")
        with pytest.raises(DataError, match=f"is {said}"):
            index_files(tmp_path / "out", files=[str(tmp_path / marker)], fields="x=/x")


def test_what_a_newer_hdf5_wrote_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((4, 3)), chunks=(1, 3))
        file["y"] = np.zeros(4)
    good = path.read_bytes()
    # The data layout message of /x: version 3, class 2 (chunked), 3 dimensions
    assert good.count(b"\3\2\3") == 1
    path.write_bytes(good.replace(b"\3\2\3", b"\x63\2\3"))
    newer = (
        rf"was written by a newer HDF5 than this one \({h5py.version.hdf5_version}\), which says: .*version"
    )
    with pytest.raises(DataError, match=f"field 'x', /x of {path}, {newer}.*h5repack --low=0 --high="):
        index_files(tmp_path / "out", files=[str(path)], fields="x=/x")
    index_files(tmp_path / "y", files=[str(path)], fields="y=/y")
    path.write_bytes(good[:8] + b"\x63" + good[9:])  # the superblock's version
    with pytest.raises(DataError, match=f"{path} {newer}"):
        index_files(tmp_path / "out", files=[str(path)], fields="x=/x")


def test_links_that_lead_nowhere_and_constant_components_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        component = file.create_group("E/x")
        component.attrs["value"], component.attrs["shape"] = 1.5, np.array([4, 5])
        file["soft"], file["twice"] = h5py.SoftLink("/gone"), h5py.SoftLink("/soft")
        file["external"], file["type"] = h5py.ExternalLink("gone.h5", "x"), np.dtype("f4")
    for name, said in {
        "E/x": r"is a constant component of openPMD.* is 1.5, its shape is \(4, 5\)",
        "soft": "leads nowhere: /soft is a soft link to /gone, which does not exist",
        "twice": "leads nowhere: /soft is a soft link to /gone, which does not exist",
        "external": "is a link to another file, gone.h5: index that file itself, which does not exist",
        "type": "is a named type, not a dataset",
    }.items():
        with pytest.raises(DataError, match=f"/{name} of .*{said}"):
            index_files(tmp_path / "out", files=[str(path)], fields=f"x=/{name}")
