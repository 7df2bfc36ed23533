"""A run's identity moves with its directory and is removed with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpctrain.checkpoint import RUN_ID, RunIdentity, identify_run
from hpctrain.checkpoint.tiers.node_store import run_key
from hpctrain.comm import SerialWorld
from hpctrain.errors import LaunchError


def identity(directory: Path) -> RunIdentity:
    directory.mkdir(exist_ok=True)
    return identify_run(directory, checkpoints=directory / "checkpoints", comm=SerialWorld())


def test_a_directory_made_again_is_another_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = identity(run)
    assert first.is_new
    assert identity(run) == RunIdentity(id=first.id, is_new=False)
    shutil.rmtree(run)
    again = identity(run)
    assert again.is_new
    assert again.id != first.id


def test_a_moved_directory_is_the_same_run_and_a_copy_another_one(tmp_path: Path) -> None:
    first = identity(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert identity(tmp_path / "moved") == RunIdentity(id=first.id, is_new=False)
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    assert identity(tmp_path / "copy").id != first.id
    assert identity(tmp_path / "moved").id == first.id
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert identity(tmp_path / "link") == RunIdentity(id=first.id, is_new=False)


def test_a_run_of_an_earlier_version_keeps_what_its_nodes_hold(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "starts.jsonl").touch()
    assert identity(run) == RunIdentity(id=run_key(run / "checkpoints"), is_new=False)


def test_the_user_may_give_an_identity(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / RUN_ID).write_text("old-0123\n")
    assert identity(run) == RunIdentity(id="old-0123", is_new=False)
    for wrong in ("", "../elsewhere", "a b"):
        (run / RUN_ID).write_text(wrong)
        with pytest.raises(LaunchError, match="must hold the run's identity in its first line"):
            identity(run)
