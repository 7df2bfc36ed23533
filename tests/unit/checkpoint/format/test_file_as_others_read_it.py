"""The file as others see it: h5py alone, h5dump, and what the documentation promises."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from hpctrain.checkpoint import save
from hpctrain.checkpoint.format.metadata import SEAL_BYTES
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.comm.backends.serial_world import SerialWorld
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

DOCUMENT = Path(__file__).parents[4] / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    return save(state_of(0, 1), directory=directory, step=50, comm=SerialWorld()).path


def test_the_documented_script_reads_every_tensor_with_h5py_alone(path: Path) -> None:
    match = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert match is not None
    script = match[1].replace('"step-00000050.h5"', repr(str(path)))
    assert len([line for line in match[1].splitlines() if line.strip()]) <= 10
    assert "hpctrain" not in match[1]
    names: dict[str, object] = {}
    exec(script, names)
    tensors = names["tensors"]
    assert isinstance(tensors, dict)
    for name, tensor in whole_tensors().items():
        assert same_bits(tensors[name], tensor), name


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_opens_it(path: Path) -> None:
    done = subprocess.run(
        ["h5dump", "-d", "/tensors/optimizer.step", str(path)], capture_output=True, text=True, check=True
    )
    assert "(0): 17" in done.stdout
    listing = subprocess.run(["h5dump", "-H", str(path)], capture_output=True, text=True, check=True).stdout
    assert 'DATASET "model%2Flayer.0%2Fweight"' in listing


def test_metadata_and_seal_are_as_documented(path: Path) -> None:
    lines = path.read_bytes()[:SEAL_BYTES].rstrip(b"\0").split(b"\n")
    seal = json.loads(lines[1])
    with h5py.File(path, "r") as file:
        assert file.userblock_size == SEAL_BYTES
        assert file.attrs["hpctrain_format"] == seal["format"] == 2
        metadata = json.loads(file["metadata"][:].tobytes())
        assert file["metadata"].id.get_offset() == seal["metadata_offset"]
        for entry in metadata["tensors"]:
            (piece,) = entry["pieces"]
            dataset = file[piece["dataset"]]
            assert list(dataset.shape) == entry["shape"]
            assert dataset.chunks is None
            if dataset.size:
                assert dataset.id.get_offset() == piece["offset"]
            if dataset.nbytes >= 1 << 16:
                assert piece["offset"] % 4096 == 0
    assert seal["file_bytes"] == path.stat().st_size
    assert metadata["step"] == 50
    assert metadata["document"] == dict(state_of(0, 1).document)
    assert [entry["name"] for entry in metadata["tensors"]] == sorted(whole_tensors())


def test_loading_needs_no_hdf5_library(path: Path) -> None:
    script = f"""
import sys
sys.modules["h5py"] = None
from hpctrain.checkpoint import load_newest_good
from hpctrain.comm.backends.serial_world import SerialWorld
restored = load_newest_good({str(path.parent)!r}, comm=SerialWorld())
assert restored.checkpoint.step == 50 and len(restored.tensors) == {len(whole_tensors())}
assert "mpi4py.MPI" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=DOCUMENT.parents[1])


def test_the_structure_is_read_back_as_it_was_written(path: Path) -> None:
    metadata = read_structure(path).metadata
    assert metadata.writer["num_ranks"] == 1
    assert metadata.writer["engine"] == "direct"
    assert {name: tensor.shape for name, tensor in metadata.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in whole_tensors().items()
    }
