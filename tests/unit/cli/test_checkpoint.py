"""`hpctrain checkpoint`: what it prints, and the error that carries exit code 4."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from hpctrain.checkpoint import save
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError, ExitCode
from tests.unit.checkpoint.states import state_of, whole_tensors

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from hpctrain.cli.checkpoint.group import checkpoint_app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    def rank_main(world: World) -> None:
        for step in (10, 20):
            save(state_of(world.rank, 2), directory=tmp_path, step=step, comm=world)

    run_threads(2, rank_main, timeout_s=300)
    return tmp_path


def output(*arguments: object) -> str:
    result = CliRunner().invoke(checkpoint_app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def error(*arguments: object) -> CheckpointError:
    result = CliRunner().invoke(checkpoint_app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, CheckpointError)
    return result.exception


def damage(path: Path) -> tuple[int, int]:
    """Flip a bit of the tensor `large`; first and last byte of the extent."""
    tensor = read_structure(path).metadata.tensors["large"]
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, tensor.pieces[0].file_offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), tensor.pieces[0].file_offset)
    _, extent = tensor.extents[0]
    return tensor.pieces[0].file_offset, tensor.pieces[0].file_offset + extent.box.shape[0] * 4 - 1


def test_list_shows_steps_newest_first_with_size_ranks_and_structure(directory: Path) -> None:
    (directory / "step-00000030.h5").write_bytes(b"rubbish")
    (directory / ".step-00000040.h5.partial-0123456789abcdef").write_bytes(b"")
    lines = output("list", directory).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["30", "20", "10"]
    assert "not an hpctrain checkpoint" in lines[1]
    assert lines[2].split()[-2:] == ["2", "ok"]
    assert "unfinished: .step-00000040" in lines[4]
    rows = json.loads(output("list", directory, "--json"))["checkpoints"]
    assert [row["step"] for row in rows] == [30, 20, 10]
    assert rows[1]["num_ranks"] == 2
    assert rows[1]["file_bytes"] == (directory / "step-00000020.h5").stat().st_size
    assert [row["error"] is None for row in rows] == [False, True, True]
    assert (directory / ".step-00000040.h5.partial-0123456789abcdef").exists()


def test_show_prints_metadata_and_every_tensor(directory: Path) -> None:
    text = output("show", directory)
    assert "step: 20" in text
    assert '"loss_scale": 65536.0' in text
    shown = json.loads(output("show", directory / "step-00000010.h5", "--json"))
    assert shown["step"] == 10
    assert {entry["name"]: entry["shape"] for entry in shown["tensors"]} == {
        name: list(tensor.shape) for name, tensor in whole_tensors().items()
    }


def test_verify_names_tensor_and_bytes_and_ends_with_the_checkpoint_code(directory: Path) -> None:
    assert output("verify", directory).count(": ok,") == 2
    first, last = damage(directory / "step-00000010.h5")
    found = error("verify", directory)
    assert found.exit_code == ExitCode.CHECKPOINT
    assert f"step-00000010.h5: tensor 'large', bytes {first} to {last} of the file" in str(found)
    assert "1 of 2 checkpoints damaged" in str(found)
    result = CliRunner().invoke(checkpoint_app, ["verify", str(directory), "--json"])
    assert [entry["ok"] for entry in json.loads(result.stdout)] == [True, False]
    assert output("verify", directory / "step-00000020.h5").count(": ok,") == 1


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    assert "is not a directory" in str(error("list", tmp_path / "none"))
    assert "cannot open" in str(error("show", tmp_path / "none"))
    assert "does not exist" in str(error("verify", tmp_path / "none"))
    assert "there is no checkpoint in" in str(error("verify", tmp_path))
    assert "no checkpoint in" in output("list", tmp_path)


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_help_has_an_example(command: str) -> None:
    assert f"hpctrain checkpoint {command} " in output(command, "--help")
