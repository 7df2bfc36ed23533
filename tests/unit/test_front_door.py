"""The public names: what a type checker and completion see is what there is; old names warn and are the new ones."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from structure import names_of_two_things, public_modules, public_names

import hpctrain
from hpctrain.comm import World, run_threads
from tests.ranks_launcher import REPOSITORY
from tests.sessions import session_over

SCRIPT = REPOSITORY / "tests" / "unit" / "typed_user_script.py"
STUBS = sorted((REPOSITORY / "hpctrain").glob("*/__init__.pyi"))
PACKAGES = ["hpctrain", *(f"hpctrain.{stub.parent.name}" for stub in STUBS)]


def names_of_stub(package: str) -> list[str]:
    """The names that the package's `__init__.pyi` exports."""
    path = Path(import_module(package).__file__ or "").with_suffix(".pyi")
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):  # of `__all__`
            continue
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # else it is not exported, by PEP 484
            found.append(alias.name)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_what_type_checkers_and_completion_see_is_there(package: str) -> None:
    module = import_module(package)
    names = names_of_stub(package)
    assert len(names) == len(set(names)) > 0
    short = package.removeprefix("hpctrain").removeprefix(".")
    shown = public_names(short) if short in public_modules() else names
    assert sorted(module.__all__) == sorted(shown)
    assert set(shown) <= {*names, *dir(module)}
    for name in names:
        assert getattr(module, name) is not None


def test_no_name_stands_for_two_things() -> None:
    assert names_of_two_things() == {}


def test_the_architecture_names_what_is_public() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    (listed,) = re.findall(r"^\*\*Public\*\* are .*?\.(?= |\n)", text, flags=re.DOTALL | re.MULTILINE)
    assert [name for name in public_modules() if f"`{name}`" not in listed and name] == []


@pytest.mark.parametrize(
    ("old", "new", "use"),
    [
        ("hpctrain.start", "hpctrain.init", "hpctrain.init"),
        ("hpctrain.Updater", "hpctrain.DistributedOptimizer", "hpctrain.DistributedOptimizer"),
        *(
            (f"hpctrain.{name}", f"hpctrain.checkpoint.{name}", f"hpctrain.checkpoint.{name}")
            for name in (
                "FromRank0",
                "Replicated",
                "SaveOptions",
                "State",
                "load_newest_good",
                "model_items",
            )
        ),
        (
            "hpctrain.TrainingState",
            "hpctrain.train.TrainingState",
            "session.save_state and session.load_state",
        ),
        ("hpctrain.resume", "hpctrain.train.resume", "session.load_state"),
        ("hpctrain.Shard", *["hpctrain.checkpoint.TensorShard"] * 2),
        ("hpctrain.StopPlan", *["hpctrain.TimeToStop"] * 2),
        ("hpctrain.checkpoint.Saving", *["hpctrain.checkpoint.CheckpointSave"] * 2),
        ("hpctrain.checkpoint.Shard", *["hpctrain.checkpoint.TensorShard"] * 2),
        ("hpctrain.data.Batches", *["hpctrain.data.EpochIterator"] * 2),
        ("hpctrain.data.verify", *["hpctrain.data.verify_dataset"] * 2),
        ("hpctrain.testing.UpdaterContract", *["hpctrain.testing.DistributedOptimizerContract"] * 2),
    ],
)
def test_an_old_name_warns_and_is_the_new_one(old: str, new: str, use: str) -> None:
    (package, name), (new_package, new_name) = (words.rsplit(".", 1) for words in (old, new))
    with pytest.warns(
        DeprecationWarning, match=f"^{re.escape(old)} is an old name.*: use {re.escape(use)}$"
    ) as seen:
        found = getattr(import_module(package), name)
    assert found is getattr(import_module(new_package), new_name)
    assert {Path(warning.filename).name for warning in seen} == {Path(__file__).name}  # where it is used
    with pytest.warns(DeprecationWarning, match="old name"):
        exec(f"from {package} import {name}")
    assert name not in dir(import_module(package))


def test_the_old_names_of_a_session_warn_and_do_the_same() -> None:
    model = torch.nn.Linear(2, 2)
    with hpctrain.init(backend="serial") as session:
        assert (session.world_size, session.local_rank, session.local_world_size) == (1, 0, 1)
        with pytest.warns(DeprecationWarning, match=r"use session\.world_size") as seen:
            assert session.num_ranks == 1
        assert Path(seen[0].filename).name == Path(__file__).name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(DeprecationWarning, match=r"use session\.distributed_optimizer") as seen:
            updater = session.updater(model, optimizer, clip_norm=1.0)
        assert Path(seen[0].filename).name == Path(__file__).name
        assert updater.optimizer is optimizer
        assert updater in session.trainings.updaters


def test_a_node_has_its_own_number_of_ranks() -> None:
    def sizes(world: World) -> tuple[int, int, int]:
        session = session_over(world, nodes=["a", "b", "b"])
        return session.world_size, session.local_rank, session.local_world_size

    assert run_threads(3, sizes, timeout_s=300) == [(3, 0, 1), (3, 0, 2), (3, 1, 2)]


def test_importing_the_command_line_loads_neither_torch_nor_h5py() -> None:
    script = "import sys, hpctrain.cli.main; print(sorted({'torch', 'h5py', 'mpi4py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_users_script_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    text = SCRIPT.read_text()
    assert [name for name in hpctrain.__all__ if name not in text] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("global_batch=4", 'global_batch="4"').replace("step=1,", 'step="1",'))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(SCRIPT), str(wrong)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    # Newer releases of numpy describe types otherwise, and then hpctrain's own files, which are read too, have errors.
    errors = [
        line
        for line in done.stdout.splitlines()
        if ": error: " in line and not line.startswith(f"hpctrain{os.sep}")
    ]
    # By name: a message that mypy has kept from an earlier run has that run's folder in it.
    assert [line.endswith("[arg-type]") and f"{wrong.name}:" in line for line in errors] == [True] * 2, (
        done.stdout + done.stderr
    )
