"""Files whose filters are plugins, indexed in place: every command reads them, or names the filter that is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from tests.ranks_launcher import REPOSITORY
from tests.unit.data.hdf5.filter_readers import IMAGES, SITES, STARTS, TOKENS, WAYS

FILTERS: dict[str, dict[str, Any]] = {
    "bitshuffle": {**hdf5plugin.Bitshuffle()},
    "blosc": {**hdf5plugin.Blosc(cname="blosclz", shuffle=1)},  # as PyTables writes it
    "blosc-snappy": {**hdf5plugin.Blosc(cname="snappy")},  # a compressor that numcodecs' Blosc does not have
    "blosc2": {**hdf5plugin.Blosc2()},
    "bzip2": {**hdf5plugin.BZip2()},
    "lz4": {**hdf5plugin.LZ4(), "shuffle": True},
    "zstd": {**hdf5plugin.Zstd()},
}


def write(directory: Path, *names: str) -> None:
    for name in names:
        with h5py.File(directory / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=IMAGES, chunks=(7, 12, 16), **FILTERS[name])
            file.create_dataset("y", data=SITES, chunks=(16,), **FILTERS[name])
            file.create_dataset("tokens", data=TOKENS, chunks=(128,), **FILTERS[name])
            file.create_dataset("starts", data=STARTS, chunks=(3,), **FILTERS[name])


def each_way(directory: Path, *words: str) -> dict[str, dict[str, str]]:
    # hdf5plugin was imported here; nothing of it may reach the process that reads.
    environ = {**os.environ, "HDF5_PLUGIN_PATH": str(directory), "PYTHONPATH": str(REPOSITORY)}
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.unit.data.hdf5.filter_readers",
        str(directory),
        *words,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environ, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_every_way_into_a_file_knows_the_filters_of_hdf5plugin(tmp_path: Path) -> None:
    write(tmp_path, *FILTERS)
    expected = {way.__name__: "ok" for way in WAYS}
    assert each_way(tmp_path) == dict.fromkeys(FILTERS, expected)


def test_a_filter_that_is_not_installed_is_named_and_not_taken_for_damage(tmp_path: Path) -> None:
    write(tmp_path, "blosc", "bitshuffle")
    assert set(each_way(tmp_path)["blosc"].values()) == {"ok"}  # the indexes are there
    found = each_way(tmp_path, "without")
    for name, described in {"blosc": r"32001 (blosc)", "bitshuffle": r"32008 (bitshuffle)"}.items():
        for way, text in found[name].items():
            assert text.startswith(("DataError", "MissingFilter")), (way, text)
            assert f"is compressed with HDF5 filter {described}, which is not installed here: " in text, way
            assert text.endswith("pip install hpctrain[formats]"), (way, text)
            assert f"{name}.h5" in text, way
            assert "damaged" not in text, way


def test_a_filter_that_hdf5plugin_does_not_have_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    write(tmp_path, "zstd")
    content = (tmp_path / "zstd.h5").read_bytes()
    (tmp_path / "zstd.h5").unlink()
    number = (32015).to_bytes(2, "little")  # as a filter message holds it
    path.write_bytes(content.replace(number, (333).to_bytes(2, "little")))
    with h5py.File(path) as file:
        assert file["x"].id.get_create_plist().get_filter(0)[0] == 333
    found = each_way(tmp_path)["odd"]["hashed"]
    assert "/y is compressed with HDF5 filter 333" in found
    assert f"which hdf5plugin {hdf5plugin.version} does not have: install a newer hdf5plugin" in found


def test_a_table_of_pytables_is_indexed_with_hashes_by_the_command(tmp_path: Path) -> None:
    program = (
        "import sys, tables, numpy as np\n"
        "with tables.open_file(sys.argv[1], 'w', filters=tables.Filters(5, 'blosc')) as file:\n"
        "    file.create_carray('/', 'x', obj=np.arange(600, dtype=np.float32).reshape(60, 10))\n"
        "    file.create_table('/', 't', obj=np.array([(n, n / 2) for n in range(60)], 'i4,f8'))\n"
    )
    path = tmp_path / "a.h5"
    subprocess.run([sys.executable, "-c", program, str(path)], timeout=300, check=True)
    environ = {**os.environ, "HDF5_PLUGIN_PATH": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}

    def hpctrain(*words: str) -> str:
        command = [sys.executable, "-m", "hpctrain.cli.main", "data", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    fields = "x=/x,n=/t:f0,half=/t:f1"
    out = str(tmp_path / "index")
    assert "60 samples" in hpctrain("index", str(path), "--fields", fields, "--hash", "--out", out)
    assert "undamaged" in hpctrain("verify", out)
    statistics = json.loads(hpctrain("info", out, "--json"))[0]["statistics"]
    assert statistics["half"]["max"] == pytest.approx(29.5)
    assert statistics["x"]["mean"] == pytest.approx(np.arange(600).mean())
