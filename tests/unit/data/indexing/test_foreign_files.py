"""Files as other programs write them: h5py's documentation, pandas, DLIO's generator, NetCDF, MATLAB."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data import Dataset, Loader, verify_dataset
from hpctrain.data.indexing.index_files import IndexReading, index_files
from hpctrain.data.indexing.request import SampleIs
from hpctrain.errors import DataError

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from hpctrain.cli.data import data_app


def opened(out: Path, *, files: list[str], fields: str, **options: Any) -> Dataset:
    index_files(out, files=files, fields=fields, **options)
    return Dataset.open(out)


def test_the_file_of_h5pys_quick_start(tmp_path: Path) -> None:
    """docs.h5py.org, Quick Start Guide: create_dataset, groups, attributes; here with data in it."""
    with h5py.File(tmp_path / "mytestfile.hdf5", "w") as f:
        dset = f.create_dataset("mydataset", (100,), dtype="i")
        dset[...] = np.arange(100)
        grp = f.create_group("subgroup")
        dset2 = grp.create_dataset("another_dataset", (50,), dtype="f")
        dset2[...] = np.arange(50) / 2
        dset3 = f.create_dataset("subgroup2/dataset_three", (10,), dtype="i")
        dset3.attrs["temperature"] = 99.5
    files = [str(tmp_path / "mytestfile.hdf5")]
    batch = opened(tmp_path / "a", files=files, fields="n=mydataset").gather(np.array([99, 1]))
    assert batch["n"].tolist() == [99, 1]
    batch = opened(tmp_path / "b", files=files, fields="x=subgroup/another_dataset").gather(np.array([9, 1]))
    assert batch["x"].tolist() == [4.5, 0.5]
    with pytest.raises(DataError, match="same number of samples: n has 100, m has 10"):
        index_files(tmp_path / "c", files=files, fields="n=mydataset,m=subgroup2/dataset_three")


def test_the_datasets_of_h5pys_documentation(tmp_path: Path) -> None:
    """docs.h5py.org, Datasets, Special types: chunked, resizable, filters, scale-offset, enum, bool, vlen."""
    data = np.arange(8 * 20 * 30, dtype=np.int32).reshape(8, 20, 30)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("chunked", data=data, chunks=(3, 10, 10))
        f.create_dataset("autochunk", data=data, chunks=True)
        f.create_dataset("resizable", (1, 20, 30), "i4", maxshape=(None, 20, None)).resize((8, 20, 30))
        f["resizable"][...] = data
        f.create_dataset("zipped", data=data, compression="gzip", compression_opts=9)
        f.create_dataset("lzf", data=data, compression="lzf", shuffle=True, fletcher32=True)
        f.create_dataset("scaled", data=data, scaleoffset=0)
        f["flags"] = data[:, 0, 0] > 2000
        colours = h5py.enum_dtype({"RED": 0, "GREEN": 1, "BLUE": 42}, basetype="i")
        f.create_dataset("colours", data=np.array([0, 1, 42, 0] * 2), dtype=colours)
        f["strings"] = ["hello", "wörld"] * 4
        f["fixed"] = np.array([b"ab", b"c"] * 4)
        lists = f.create_dataset("lists", (8,), h5py.vlen_dtype(np.dtype("int32")))
        for row in range(8):
            lists[row] = np.arange(row)
        f["matrices"] = np.zeros(8, np.dtype([("m", "f4", (2, 2))]))
        f["half"] = data[:, 0, 0].astype("f2")
    arrays = ("chunked", "autochunk", "resizable", "zipped", "lzf", "scaled")
    others = ("flags", "colours", "strings", "fixed", "lists", "half")
    fields = ",".join([*(f"{name}={name}" for name in (*arrays, *others)), "m=matrices:m"])
    index_files(tmp_path / "index", files=[str(tmp_path)], fields=fields, reading=IndexReading.CONTENT)
    order = np.array([7, 0, 4, 4, 1])
    batch = Dataset.open(tmp_path / "index").gather(order)
    for name in arrays:
        assert np.array_equal(batch[name], data[order]), name
    assert batch["flags"].tolist() == [True, False, True, True, False]
    assert batch["colours"].tolist() == [0, 0, 0, 0, 1]
    assert batch["strings"].tolist() == [1, 0, 0, 0, 1]
    assert batch["fixed"].tolist() == [1, 0, 0, 0, 1]
    assert batch["lists.length"].tolist() == [7, 0, 4, 4, 1]
    assert batch["m"].shape == (5, 2, 2)
    assert batch["half"].dtype == np.float16
    assert verify_dataset(tmp_path / "index") == []


PANDAS = """
import sys
import pandas as pd
frame = pd.DataFrame({"a": [0.5, 1.5, 2.5, 3.5], "b": [4.0, 5.0, 6.0, 7.0], "n": [1, 2, 3, 4]})
frame["flag"] = [True, False, True, True]
frame.to_hdf(sys.argv[1] + "/fixed.h5", key="df", mode="w")
frame["name"] = ["x", "yy", "x", "z"]
frame.to_hdf(sys.argv[1] + "/table.h5", key="df", mode="w", format="table", data_columns=["n", "name"])
frame.to_hdf(sys.argv[1] + "/zipped.h5", key="df", mode="w", format="table", complevel=5, complib="blosc")
frame[["name"]].to_hdf(sys.argv[1] + "/objects.h5", key="df", mode="w")
"""


@pytest.fixture(scope="module")
def pandas_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pandas")
    directory = tmp_path_factory.mktemp("pandas")
    # PyTables has an HDF5 of its own, which is better kept out of this process.
    subprocess.run([sys.executable, "-W", "ignore", "-c", PANDAS, str(directory)], check=True, timeout=300)
    return directory


def test_pandas_fixed_format(pandas_files: Path, tmp_path: Path) -> None:
    files = [str(pandas_files / "fixed.h5")]
    dataset = opened(
        tmp_path / "index",
        files=files,
        fields="x=/df/block0_values,n=/df/block1_values,flag=/df/block2_values,row=/df/axis1",
        reading=IndexReading.CONTENT,
    )
    batch = dataset.gather(np.array([3, 0]))
    assert batch["x"].tolist() == [[3.5, 7], [0.5, 4]]
    assert batch["n"].tolist() == [[4], [1]]
    assert batch["flag"].astype(bool).tolist() == [[True], [True]]
    assert batch["row"].tolist() == [3, 0]
    assert verify_dataset(tmp_path / "index") == []
    with pytest.raises(DataError, match=r"pickled Python objects .*format='table'"):
        index_files(tmp_path / "b", files=[str(pandas_files / "objects.h5")], fields="x=/df/block0_values")


def test_pandas_table_format(pandas_files: Path, tmp_path: Path) -> None:
    files = [str(pandas_files / "table.h5")]
    fields = "x=/df/table:values_block_0,n=/df/table:n,name=/df/table:name"
    dataset = opened(tmp_path / "index", files=files, fields=fields, reading=IndexReading.CONTENT)
    batch = dataset.gather(np.array([3, 1, 0]))
    assert batch["x"].tolist() == [[3.5, 7], [1.5, 5], [0.5, 4]]
    assert batch["n"].tolist() == [4, 2, 1]
    assert [dataset.fields["name"].classes[n] for n in batch["name"]] == ["z", "yy", "x"]
    zipped = [str(pandas_files / "zipped.h5")]
    dataset = opened(tmp_path / "zipped", files=zipped, fields="x=/df/table:values_block_0")
    assert dataset.gather(np.array([2]))["x"].tolist() == [[2.5, 6]]
    with pytest.raises(DataError, match=r"is a table \(compound\) of index, values_block_0.*choose a member"):
        index_files(tmp_path / "c", files=files, fields="x=/df/table")


@pytest.mark.parametrize("options", [{}, {"chunks": (1, 16, 16), "compression": "gzip"}])
def test_dlios_generator(options: dict[str, Any], tmp_path: Path) -> None:
    """DLIO writes `records` (samples, D, D) uint8 and `labels` (samples,) int64 into img_<i>_of_<n>.hdf5."""
    images = np.random.default_rng(0).integers(255, size=(3, 4, 16, 16), dtype=np.uint8)
    for number, records in enumerate(images):
        with h5py.File(tmp_path / f"img_{number}_of_3.hdf5", "w") as file:
            dataset = file.create_dataset("records", (4, 16, 16), dtype=np.uint8, **options)
            dataset[:] = records
            file.create_dataset("labels", data=[number] * 4)
    pattern = f"{tmp_path}/img_*_of_3.hdf5"
    dataset = opened(tmp_path / "index", files=[pattern], fields="image=/records,label=/labels")
    loader = Loader(dataset, global_batch=5, rank=0, num_ranks=1, seed=0)
    labels = [label for batch in loader.epoch(0) for label in batch["label"].tolist()]
    assert sorted(labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert np.array_equal(dataset.gather(np.arange(4, 8))["image"], images[1])
    again = index_files(tmp_path / "again", files=[pattern], fields="image=/records").manifest
    assert again.samples == 12, "files that a dataset of the process has open can be indexed"


def test_netcdf_and_matlab_write_hdf5_too(tmp_path: Path) -> None:
    """NetCDF-4: dimension scales beside the variables. MATLAB 7.3: a user block of 512 bytes, column-major."""
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["time"] = np.arange(6.0)
        file["time"].make_scale("time")
        file.create_dataset("t2m", data=np.ones((6, 4, 4), "f4"), chunks=(1, 4, 4), compression="gzip")
        file["t2m"].dims[0].attach_scale(file["time"])
    batch = opened(tmp_path / "nc", files=[str(tmp_path / "a.nc")], fields="x=t2m,t=time").gather(
        np.array([5])
    )
    assert (batch["t"].tolist(), batch["x"].sum()) == ([5.0], 16)
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["X"] = np.arange(12.0).reshape(6, 2)
        file["X"].attrs["MATLAB_class"] = np.bytes_(b"double")
    batch = opened(tmp_path / "mat", files=[str(tmp_path / "a.mat")], fields="x=X").gather(np.array([5, 1]))
    assert batch["x"].tolist() == [[10, 11], [2, 3]]


def test_a_big_endian_set_of_one_sample_a_file(tmp_path: Path) -> None:
    for number in range(5):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.full((3, 3), number, ">f4")
            file["y"] = np.array(number, ">i2")
    dataset = opened(tmp_path / "index", files=[str(tmp_path)], fields="x=x,y=y", samples=SampleIs.FILE)
    batch = dataset.gather(np.array([4, 2]))
    assert batch["x"][:, 0, 0].tolist() == [4, 2]
    assert batch["y"].tolist() == [4, 2]
    assert batch["x"].dtype == np.dtype("=f4")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer")
def test_the_command_indexes_verifies_and_says_what_is_wrong(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"f{number}.h5", "w") as file:
            file["images"] = np.full((4, 2, 2), number, np.float32)
            file["labels"] = np.arange(4)
            file["tokens"] = np.arange(50, dtype=np.uint16)
    pattern, out = f"{tmp_path}/f*.h5", tmp_path / "index"

    def run(*arguments: str | Path) -> Any:
        return CliRunner().invoke(data_app, [str(argument) for argument in arguments])

    result = run("index", pattern, "--fields", "x=/images,y=/labels", "--out", out, "--hash")
    assert result.exception is None, result.output
    assert f"{out}: 8 samples in 2 shards" in result.stdout
    assert "undamaged" in run("verify", out).stdout
    info = run("info", out).stdout
    assert "field x: float32 (2, 2)" in info
    tokens = ("--fields", "tokens=/tokens", "--tokens", "10", "--stride", "5", "--relative")
    result = run("index", pattern, *tokens, "--out", tmp_path / "tokens")
    assert "16 token windows in 2 shards" in result.stdout, result.output
    for arguments, message in (
        (("--fields", "x=/images", "--samples", "columns"), "--samples columns: rows, file or groups"),
        (("--fields", "x=/images", "--stride", "3"), "--stride and --documents need --tokens"),
        (("--fields", "x=/nothing"), "has no /nothing; / holds images, labels, tokens"),
    ):
        result = run("index", pattern, *arguments, "--out", tmp_path / "c")
        assert message in str(result.exception)


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).resolve().parents[4] / "docs" / "guides" / "data-index.md"
    (block,) = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(guide), "exec"), {})
    assert (tmp_path / "data" / "measured" / "manifest.json").exists()
