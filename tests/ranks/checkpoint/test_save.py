"""Checkpoints under real mpirun: both backends, both engines, 1 to 4 ranks, and from N ranks to M."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.comm.backends.serial_world import SerialWorld
from tests.ranks.checkpoint import save_cases as cases
from tests.ranks_launcher import has_horovod, run_command, run_ranks

pytestmark = pytest.mark.launches

# In this order every launch loads what other numbers of ranks have saved: 4 on 1, 4 and 1 on 3, and so on.
LAUNCHES = [("mpi", 4), ("horovod", 1), ("mpi", 3), ("horovod", 2), ("mpi", 1), ("horovod", 3)]
if not has_horovod():
    LAUNCHES = [launch for launch in LAUNCHES if launch[0] == "mpi"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoint directories, written by each backend, number of ranks and engine, and loaded
    bit for bit by the launches after it."""
    directory = tmp_path_factory.mktemp("saved")
    for place, (backend, num_ranks) in enumerate(LAUNCHES):
        result = run_ranks(num_ranks, cases.load_others_and_save, str(directory), backend=backend)
        for found in result.outputs:
            assert len(found["loaded"]) == 2 * place
            assert found["direct"].startswith("direct: requested")
            assert found["mpio"].startswith("mpio: requested")
            assert found["auto"].startswith("direct: " if num_ranks > 1 else "direct: there is only one rank")
    return directory


def test_engines_and_numbers_of_ranks_write_the_same_datasets_and_load_each_other(saved: Path) -> None:
    paths = sorted(saved.glob("*/step-00000005.h5"))
    assert len(paths) == 3 * len(LAUNCHES)
    expected = cases.digests(paths[0])
    assert len(expected) > 10
    for path in paths[1:]:
        assert cases.digests(path) == expected, path.parent.name
    for path in paths:
        assert read_structure(path).metadata.writer["num_ranks"] == int(path.parent.name.split("-")[1])
        assert not verify(path, comm=SerialWorld())[0].damage
    assert not list(saved.glob("*/.*"))


@pytest.mark.skipif(not has_horovod(), reason="Horovod is not installed: hpctrain runs without it")
def test_groups_of_ranks_save_beside_each_other(tmp_path: Path) -> None:
    result = run_ranks(4, cases.save_in_groups, str(tmp_path), backend="horovod")
    assert len(set(result.outputs)) == 2


def test_verify_shares_the_work_between_ranks_and_ends_with_exit_code_4(saved: Path) -> None:
    argv = [sys.executable, "-m", "hpctrain.cli.main", "checkpoint", "verify"]
    path = saved / "mpi-4-direct" / "step-00000005.h5"
    tensor = read_structure(path).metadata.tensors["rows"]
    content = path.read_bytes()
    spoiled = bytearray(content)
    spoiled[tensor.pieces[0].file_offset + 100] ^= 16
    try:
        path.write_bytes(spoiled)
        result = run_command(2, [*argv, str(path)], expect=4)
    finally:
        path.write_bytes(content)
    assert f"tensor 'rows', bytes {tensor.pieces[0].file_offset} to " in result.stderr
    assert result.stdout.count("DAMAGED") == 1
