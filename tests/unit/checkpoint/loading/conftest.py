"""A good checkpoint, for tests that damage copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.checkpoint import save
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from tests.unit.checkpoint.states import state_of, whole_tensors


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks, sharded tensors included."""
    directory = tmp_path_factory.mktemp("good")
    tensors = whole_tensors()
    tensors["large"] = tensors["large"][:200]  # small enough for hundreds of trials

    def rank_main(world: World) -> None:
        save(state_of(world.rank, 3, tensors=tensors), directory=directory, step=1, comm=world)

    run_threads(3, rank_main, timeout_s=300)
    return directory / "step-00000001.h5"
