"""A run goes on from a checkpoint that is a folder, and what it saves names the one that it came from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import open_checkpoint, save
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.train.state.training_state import Position, Resumed, TrainingState, resume
from tests.unit.reduce.data_parallel.updater_cases import reducer_for

IDENTITY = {"dataset": "none"}


def training_state(world: World, *, value: float) -> TrainingState:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer_for(world), bucket_bytes=4000)
    return TrainingState(model, optimizer, updater, 0)


def go_on(world: World, source: Path, *, named: bool) -> tuple[Resumed, float]:
    state = training_state(world, value=0.0)
    try:
        resumed = resume(state, source=source, named=named, comm=world, identity=IDENTITY)
        return resumed, float(next(iter(state.model.parameters())).detach().mean())
    finally:
        state.updater.close()


def test_a_run_resumes_from_a_folder_named_or_found_and_its_checkpoints_have_a_parent(tmp_path: Path) -> None:
    def first(world: World) -> Path:
        state = training_state(world, value=4.0)
        captured = state.capture(Position(step=2), comm=world, identity=IDENTITY)
        state.updater.close()
        return save(captured, directory=tmp_path, step=2, comm=world, files=2).path

    path = run_threads(2, first, timeout_s=300)[0]
    assert path == tmp_path / "step-00000002"

    def second(world: World) -> list[tuple[Resumed, float]]:
        return [go_on(world, path, named=True), go_on(world, tmp_path, named=False)]

    parent = {"step": 2, "id": open_checkpoint(path, comm=SerialWorld()).metadata.id}
    for outcomes in run_threads(3, second, timeout_s=300):
        for resumed, value in outcomes:
            assert (resumed.position.step, resumed.path, resumed.parent, value) == (2, path, parent, 4.0)

    def third(world: World) -> Path:
        state = training_state(world, value=5.0)
        captured = state.capture(Position(step=3), comm=world, identity=IDENTITY, parent=parent)
        state.updater.close()
        return save(captured, directory=tmp_path, step=3, comm=world).path

    newest = open_checkpoint(run_threads(2, third, timeout_s=300)[0], comm=SerialWorld())
    assert newest.metadata.parent == parent
    assert newest.metadata.id != parent["id"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"position": {"step": 2, "start": 0, "samples": 0}}, "epoch"),
        (
            {"position": {"step": "2", "epoch": 0, "start": 0, "samples": 0}},
            "its position must have integers of 0 or more, but has {'step': '2'}",
        ),
        (
            {"position": {"step": 2, "epoch": -1, "start": 0, "samples": 0}},
            "its position must have integers of 0 or more, but has {'epoch': -1}",
        ),
        ({"updater": {}}, "loss_scale"),
        ({"num_ranks": None}, "TypeError"),
    ],
)
def test_a_document_that_says_too_little_is_an_error_and_changes_nothing(
    tmp_path: Path, changed: dict[str, Any], expected: str
) -> None:
    world = SerialWorld()
    other = training_state(world, value=4.0)
    captured = other.capture(Position(step=2), comm=world, identity=IDENTITY)
    other.updater.close()
    path = save(
        replace(captured, document={**captured.document, **changed}), directory=tmp_path, step=2, comm=world
    ).path
    state = training_state(world, value=0.0)
    with pytest.raises(CheckpointError, match=f"lacks training state: .*{re.escape(expected)}"):
        resume(state, source=path, named=True, comm=world, identity=IDENTITY)
    assert all(not parameter.any() for parameter in state.model.parameters())
    state.updater.close()


def test_a_named_folder_that_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "step-00000002"
    broken.mkdir()
    world = SerialWorld()
    with pytest.raises(CheckpointError, match=r"data-00000\.h5"):
        go_on(world, broken, named=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        go_on(world, tmp_path, named=False)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        go_on(world, tmp_path / "elsewhere", named=True)
