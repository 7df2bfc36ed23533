"""`hpctrain checkpoint` diff, export, import, copy, prune and request: what they print, make, and end with."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch

from hpctrain.checkpoint import Replicated, State, save
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
from tests.ranks_launcher import run_command
from tests.unit.checkpoint.states import state_of, whole_tensors

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner, Result

    from hpctrain.cli.checkpoint.group import checkpoint_app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint_app, [str(argument) for argument in arguments])


def output(*arguments: object, code: int = 0) -> str:
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def error(*arguments: object) -> HpctrainError:
    result = invoke(*arguments)
    assert isinstance(result.exception, HpctrainError), result.output
    return result.exception


def saved(directory: Path, *, step: int, loss: float = 0.5) -> Path:
    weight = torch.arange(12.0).reshape(3, 4)
    weight[1, 1] += step
    items = [
        Replicated(name="model/weight", tensor=weight),
        Replicated(name="optimizer/moment", tensor=torch.ones(5)),
    ]
    document = {"position": {"step": step}, "quality": {"loss": loss}}
    state = State(items=items, document=document)
    return save(state, directory=directory, step=step, comm=SerialWorld(), keep=None).path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files, by two ranks."""

    def rank_main(world: World) -> Path:
        state = state_of(world.rank, 2)
        return save(state, directory=tmp_path / "run", step=20, comm=world, files=2).path

    return run_threads(2, rank_main, timeout_s=300)[0]


def test_list_and_show_know_folders(folder: Path) -> None:
    (folder.parent / "step-00000030").mkdir()
    saved(folder.parent, step=5, loss=0.25)
    broken, good, single = output("list", folder.parent).splitlines()[1:]
    assert broken.split()[0] == "30"
    assert broken.split()[-1] != "ok"
    assert good.split()[-3:] == ["2", "2", "ok"]
    assert single.split()[-5:] == ["1", "1", "ok", "loss", "0.25"]
    rows = json.loads(output("list", folder.parent, "--json"))["checkpoints"]
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert (rows[1]["num_files"], rows[1]["file_bytes"], rows[1]["error"]) == (2, num_bytes, None)
    assert rows[2]["quality"] == {"loss": 0.25}
    shown = json.loads(output("show", folder, "--json"))
    assert (shown["num_files"], shown["file_bytes"], shown["id"]) == (2, num_bytes, rows[1]["id"])
    assert {entry["name"] for entry in shown["tensors"]} == set(whole_tensors())
    assert {number for entry in shown["tensors"] for number in entry["files"]} == {0, 1}
    assert "num_files: 2" in output("show", folder)
    assert output("verify", folder).count(": ok,") == 1


def test_list_shows_only_numbers_and_plain_names_of_what_a_file_claims(tmp_path: Path) -> None:
    quality = {"loss": 0.5, "big": 10**400, "text": "\x1b[31m", "\x1b[31m": 1.0, "list": [1.0]}
    state = State(items=[Replicated(name="a", tensor=torch.ones(1))], document={"quality": quality})
    save(state, directory=tmp_path, step=1, comm=SerialWorld())
    assert output("list", tmp_path).splitlines()[1].split()[-3:] == ["ok", "loss", "0.5"]
    assert "\x1b" not in output("show", tmp_path)


def test_diff_says_what_differs_and_ends_with_1_as_diff_does(tmp_path: Path) -> None:
    first, second = saved(tmp_path, step=10), saved(tmp_path, step=20)
    lines = output("diff", first, second, code=1).splitlines()
    assert lines[0] == f"- {first} (step 10)"
    assert lines[2] == "tensors: 1 the same, 1 differ, 0 only in the first, 0 only in the second"
    assert lines[3].startswith(
        "  model/weight  float32 [3, 4]: 1 of 12 elements differ, by at most 10, relative "
    )
    assert lines[4:] == ["document: 1 entries differ", "  position.step: 10 -> 20"]
    assert "0 differ" in output("diff", first, first)
    assert "0 differ" in output("diff", first, second, "--prefix", "optimizer/")
    assert "0 differ" in output("diff", first, second, "--prefix", "model/", "--atol", "10")
    found = json.loads(output("diff", first, second, "--json", code=1))
    assert (found["equal"], found["same"]) == (False, 1)
    assert found["changed"][0]["max_abs"] == 10
    assert found["document"] == [{"path": "position.step", "first": "10", "second": "20"}]
    assert isinstance(error("diff", first, tmp_path / "none"), CheckpointError)
    assert isinstance(error("diff", first, second, "--atol", "-1"), UsageError)


def test_ranks_compare_together_and_all_end_with_1(tmp_path: Path) -> None:
    first, second = saved(tmp_path, step=10), saved(tmp_path, step=20)
    command = [sys.executable, "-m", "hpctrain.cli.main", "checkpoint", "diff", first, second, "--json"]
    result = run_command(2, [str(word) for word in command], expect=1)
    assert json.loads(result.stdout[: result.stdout.rindex("}") + 1])["changed"][0]["different"] == 1


def test_export_and_import_go_there_and_back(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", step=10)
    weights, everything = tmp_path / "w.safetensors", tmp_path / "all.safetensors"
    assert "1 tensors of step 10" in output("export", tmp_path / "run", "--to", weights, "--weights")
    assert list(safetensors.torch.load_file(weights)) == ["weight"]
    made = json.loads(output("export", path, "--to", everything, "--json"))
    assert made == {"path": str(everything), "step": 10, "tensors": 2, "bytes": everything.stat().st_size}
    output("export", path, "--to", tmp_path / "w.pt", "--prefix", "model/")
    assert list(torch.load(tmp_path / "w.pt", weights_only=True)) == ["weight"]
    assert "exists" in str(error("export", path, "--to", weights))
    output("export", path, "--to", weights, "--weights", "--replace")
    assert isinstance(error("export", path, "--to", tmp_path / "x.onnx"), UsageError)
    assert isinstance(error("export", path, "--to", weights, "--weights", "--prefix", "a"), UsageError)

    output("import", everything, tmp_path / "back")
    assert "0 differ" in output("diff", path, tmp_path / "back" / path.name)
    again = json.loads(output("import", tmp_path / "w.pt", tmp_path / "start", "--step", 0, "--json"))
    assert "0 differ" in output("diff", path, again["path"], "--prefix", "model/")
    assert isinstance(error("import", weights, tmp_path / "start"), UsageError)
    assert "exists" in str(error("import", weights, tmp_path / "start", "--step", 0))


def test_copy_goes_from_folder_to_file_and_says_so(folder: Path, tmp_path: Path) -> None:
    assert "byte for byte" in output("copy", folder.parent, tmp_path / "archive")
    made = json.loads(output("copy", folder, tmp_path / "single", "--files", 1, "--json"))
    assert made["path"] == str(tmp_path / "single" / "step-00000020.h5")
    assert "0 differ" in output("diff", made["path"], tmp_path / "archive" / "step-00000020")
    assert "exists" in str(error("copy", folder, tmp_path / "archive"))


def test_prune_says_what_stays_and_what_goes(tmp_path: Path) -> None:
    for step, loss in ((10, 0.1), (20, 0.3), (30, 0.2)):
        saved(tmp_path, step=step, loss=loss)
    text = output("prune", tmp_path, "--keep", 1, "--keep-best", "loss:min", "--dry-run")
    assert text.splitlines()[:4] == [
        "verified: step-00000030.h5",
        "kept: step-00000030.h5",
        "kept: step-00000010.h5",
        "would be deleted: step-00000020.h5",
    ]
    assert len(list(tmp_path.iterdir())) == 3
    done = json.loads(output("prune", tmp_path, "--keep", 1, "--json"))
    assert done["deleted"] == ["step-00000010.h5", "step-00000020.h5"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000030.h5"]
    assert isinstance(error("prune", tmp_path / "none", "--keep", 1), CheckpointError)
    assert isinstance(error("prune", tmp_path, "--keep", 1, "--keep-best", "loss"), UsageError)
    assert invoke("prune", tmp_path).exit_code == 2  # --keep must be given


def test_request_leaves_the_file_that_a_run_looks_for(tmp_path: Path) -> None:
    assert isinstance(error("request", tmp_path), UsageError)
    (tmp_path / "recipe.toml").write_text("")
    assert "save-now" in output("request", tmp_path)
    assert (tmp_path / "save-now").exists()


@pytest.mark.parametrize("command", ["diff", "export", "import", "copy", "prune", "request"])
def test_help_has_an_example(command: str) -> None:
    assert f"hpctrain checkpoint {command} " in output(command, "--help")
