"""A checkpoint that one rank writes alone is recovered like any other, and one that is not whole is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import (
    FromRank0,
    LocalStore,
    Replicated,
    State,
    Tiers,
    keep_state,
    load,
    recover,
    save,
)
from hpctrain.comm import SerialWorld
from hpctrain.errors import CheckpointError
from hpctrain.topology import Topology


def state(number: float) -> State:
    return State(
        items=[
            Replicated(name="model/w", tensor=torch.full((1000,), number)),
            FromRank0(name="model/mean", tensor=torch.tensor(number)),
        ],
        document={"number": number},
    )


def tiers_of(folder: Path) -> Tiers:
    topology = Topology.from_node_names(["n/1"])
    return Tiers.open(
        local=folder / "local", shared=folder / "shared", topology=topology, comm=SerialWorld(), run="run",
        partners=False,
    )  # fmt: skip


def test_the_newest_state_that_was_kept_is_recovered_and_older_ones_are_removed(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path)
    for step in (7, 8):
        keep_state(tiers.store, state(step), step=step)
    assert tiers.store.kept_steps() == [8]
    found = recover(tiers, comm=SerialWorld())
    assert (found.step, found.notes) == (8, ())
    assert found.path is not None
    checkpoint, tensors = load(found.path, comm=SerialWorld())
    assert checkpoint.document == {"number": 8}
    assert torch.equal(tensors["model/w"], torch.full((1000,), 8.0))
    assert float(tensors["model/mean"]) == 8.0
    tiers.store.remove()
    assert not (tmp_path / "local" / "run").exists()


def test_a_newer_checkpoint_in_the_shared_folder_counts(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path)
    keep_state(tiers.store, state(7), step=7)
    save(state(8), directory=tmp_path / "shared", step=8, comm=SerialWorld())
    assert recover(tiers, comm=SerialWorld()).path is None


def test_a_state_without_its_note_is_not_recovered_and_what_a_killed_rank_leaves_is_removed(
    tmp_path: Path,
) -> None:
    tiers = tiers_of(tmp_path)
    keep_state(tiers.store, state(7), step=7)
    next(tiers.store.kept.glob("*.json")).unlink()
    (tiers.store.kept / ".taking-0123").mkdir()
    assert tiers.store.kept_steps() == []
    assert recover(tiers, comm=SerialWorld()).path is None
    tiers_of(tmp_path)
    assert not (tiers.store.kept / ".taking-0123").exists()


def test_steps_that_the_run_discards_are_forgotten(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path)
    keep_state(tiers.store, state(7), step=7)
    tiers.forget(from_step=7, comm=SerialWorld())
    assert tiers.store.kept_steps() == []


def test_storage_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "local").write_text("not a folder")
    store = LocalStore(base=tmp_path / "local" / "run", node="n", keep_steps=1)
    with pytest.raises(CheckpointError, match="keep the state"):
        keep_state(store, state(1), step=1)
