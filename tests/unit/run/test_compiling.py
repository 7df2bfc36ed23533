"""`run.compile` without a compiler at work: what is refused, where code is kept, and what a first batch leaves behind.

Trainings of compiled models are in tests/ranks/train/test_compiled.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm import SerialWorld
from hpctrain.errors import LaunchError, RecipeError
from hpctrain.run import parse_recipe
from hpctrain.run.compiling import CACHE_VARIABLE, _unchanged, check_compilable, prepare_to_compile
from hpctrain.train import TaskRunner
from tests.sessions import session_over
from tests.unit.run.training_cases import Task


def recipe_with(**sections: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": "runs/a", "steps": 10, "compile": True},
        "task": {"target": "tests:Task"},
        "data": {"train": "data", "global_batch": 8},
    }
    return {**document, **sections}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"pipeline": 2, "micro_batches": 4}}, "parallel.pipeline = 2"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor = 2"),
        (
            {"parallel": {"activation_checkpointing": "blocks"}},
            "parallel.activation_checkpointing = 'blocks'",
        ),
        ({"parallel": {"shard": "parameters"}}, "parallel.shard = 'parameters'.*use shard = 'optimizer'"),
        ({"reduction": {"sync_batch_norm": True}}, "reduction.sync_batch_norm, which communicates"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_recipe(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"run.compile = true cannot be combined with {message}"):
        parse_recipe(recipe_with(**sections))


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_data_parallel_models_can_be_compiled(shard: str) -> None:
    assert parse_recipe(recipe_with(parallel={"shard": shard})).run.compile
    assert not parse_recipe(recipe_with(run={"directory": "runs/a", "steps": 10})).run.compile


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A program that passes for a compiler, in a folder of its own."""
    program = tmp_path / "bin" / "a++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_a_missing_compiler_is_refused(tmp_path: Path, compiler: Path) -> None:
    session = session_over(SerialWorld())
    no_compiler = {"PATH": str(tmp_path), "SLURM_TMPDIR": str(tmp_path)}
    with pytest.raises(LaunchError, match=r"needs a C\+\+ compiler.*Looked for: g\+\+, as CXX is not set"):
        prepare_to_compile(session, environ=no_compiler)
    with pytest.raises(LaunchError, match=r"Looked for: CXX = b\+\+; it is not"):
        prepare_to_compile(session, environ={**no_compiler, "CXX": "b++"})
    for environ in ({"CXX": str(compiler)}, {"CXX": "a++", "PATH": str(compiler.parent)}):
        prepare_to_compile(session, environ={**no_compiler, **environ})


def test_code_is_kept_in_a_folder_of_the_user_alone(tmp_path: Path, compiler: Path) -> None:
    session = session_over(SerialWorld())
    environ = {"CXX": str(compiler), "SLURM_TMPDIR": str(tmp_path)}
    prepare_to_compile(session, environ=environ)
    directory = Path(environ[CACHE_VARIABLE])
    own = directory.parent
    assert own.parent == tmp_path
    assert own.stat().st_mode & 0o777 == 0o700
    assert f"torch-{torch.__version__}-{torch.get_num_threads()}-threads" == directory.name

    given = {**environ, CACHE_VARIABLE: str(tmp_path / "given")}
    prepare_to_compile(session, environ=given)
    assert given[CACHE_VARIABLE] == str(tmp_path / "given")


@pytest.mark.parametrize("how", ["others may write", "a link"])
def test_a_folder_of_others_is_refused(tmp_path: Path, compiler: Path, how: str) -> None:
    session = session_over(SerialWorld())
    environ = {"CXX": str(compiler), "SLURM_TMPDIR": str(tmp_path)}
    prepare_to_compile(session, environ=environ)
    own = Path(environ.pop(CACHE_VARIABLE)).parent
    if how == "others may write":
        own.chmod(0o777)
    else:
        own.rename(tmp_path / "elsewhere")
        own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=f"others can write to {own}"):
        prepare_to_compile(session, environ=environ)
    assert CACHE_VARIABLE not in environ


def test_the_first_batch_leaves_buffers_and_generators_as_they_were() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    buffers = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with _unchanged(model, device=torch.device("cpu")):
        model(torch.rand(4, 3))
        drawn()
        model[0].running_var = torch.zeros(3)
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert drawn() == expected
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, before[name])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_scripted_models_are_refused() -> None:
    linear = torch.nn.Linear(3, 2)
    for model, which in (
        (torch.jit.script(linear), "since it is already compiled"),
        (torch.nn.Sequential(linear, torch.jit.script(linear)), "since its module '1' is already compiled"),
    ):
        runner = TaskRunner(Task(), model, device=torch.device("cpu"))
        with pytest.raises(RecipeError, match=f"the model of m:T cannot be compiled, {which} by torch.jit"):
            check_compilable(model, runner, target="m:T")
