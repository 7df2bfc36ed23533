"""Copies of checkpoints, and deleting them by hand: nothing torn, nothing lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import Replicated, State, load, save
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.operations.diff import compare
from hpctrain.checkpoint.operations.maintenance import copy_checkpoint, prune, verify
from hpctrain.checkpoint.retention.policy import Best, Retention
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

SERIAL = SerialWorld()
FIXTURE = Path(__file__).parents[3] / "fixtures" / "checkpoint-v1" / "step-00000007.h5"


def saved(directory: Path, *, files: int = 1, ranks: int = 3, step: int = 50) -> Path:
    def rank_main(world: World) -> Path:
        state = state_of(world.rank, ranks)
        return save(state, directory=directory, step=step, comm=world, files=files, keep=None).path

    return run_threads(ranks, rank_main, timeout_s=300)[0]


def damage(path: Path) -> None:
    """Flip bits of the tensor `large`."""
    piece = read_structure(path).metadata.tensors["large"].pieces[0]
    file_path = path / f"data-{piece.file:05}.h5" if path.is_dir() else path
    with open(file_path, "r+b") as file:
        file.seek(piece.file_offset + 100)
        byte = file.read(1)[0]
        file.seek(piece.file_offset + 100)
        file.write(bytes([byte ^ 4]))


def file_bytes(path: Path) -> dict[str, bytes]:
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_copy_has_the_same_bytes_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr("hpctrain.checkpoint.operations.maintenance.RANGE_BYTES", 1 << 20)
    for files, step in ((1, 50), (3, 60)):
        path = saved(tmp_path / "run", files=files, step=step)
        copies = run_threads(
            num_ranks,
            lambda world, p=path: copy_checkpoint(p, tmp_path / "archive", comm=world),
            timeout_s=300,
        )  # type: ignore[misc]
        assert copies[0].path == tmp_path / "archive" / path.name
        assert file_bytes(copies[0].path) == file_bytes(path)
        assert copies[0].num_bytes == sum(map(len, file_bytes(path).values()))
    assert sorted(os.listdir(tmp_path / "archive")) == ["step-00000050.h5", "step-00000060"]


@pytest.mark.parametrize(
    ("num_ranks", "before", "after"), [(1, 1, 4), (1, 3, 1), (1, 3, 2), (3, 3, 2), (2, 1, 2)]
)
def test_a_copy_in_other_files_has_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, before: int, after: int
) -> None:
    monkeypatch.setattr("hpctrain.checkpoint.operations.import_tensors.SHARD_BYTES", 1 << 16)
    path = saved(tmp_path / "run", files=before)
    copies = run_threads(
        num_ranks,
        lambda world: copy_checkpoint(path, tmp_path / "other", comm=world, files=after),
        timeout_s=300,
    )
    made = copies[0].path
    assert len(file_bytes(made)) == after
    assert made.is_dir() == (after > 1)
    assert not verify(made, comm=SERIAL)[0].damage
    assert compare(path, made, comm=SERIAL).is_empty
    checkpoint, tensors = load(made, comm=SERIAL)
    assert checkpoint.document["loss_scale"] == 65536.0
    for name, tensor in whole_tensors().items():
        assert same_bits(tensors[name], tensor), name


@pytest.mark.parametrize("files", [None, 1, 2])
def test_a_checkpoint_of_format_1_is_copied(tmp_path: Path, files: int | None) -> None:
    made = copy_checkpoint(FIXTURE, tmp_path, comm=SERIAL, files=files)
    assert compare(FIXTURE, made.path, comm=SERIAL).is_empty


@pytest.mark.parametrize("files", [None, 2])
def test_a_damaged_checkpoint_is_not_copied_and_nothing_is_left(tmp_path: Path, files: int | None) -> None:
    path = saved(tmp_path / "run", files=2)
    damage(path)
    with pytest.raises(CheckpointError, match="tensor 'large'"):
        run_threads(
            2, lambda world: copy_checkpoint(path, tmp_path / "other", comm=world, files=files), timeout_s=300
        )
    assert not (tmp_path / "other").exists() or not os.listdir(tmp_path / "other")


def test_a_checkpoint_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    old = saved(tmp_path / "archive", files=2)
    path = saved(tmp_path / "run")
    before = file_bytes(old)
    with pytest.raises(CheckpointError, match="step-00000050 exists"):
        copy_checkpoint(path, tmp_path / "archive", comm=SERIAL)
    assert file_bytes(old) == before
    for target in (tmp_path / "archive", tmp_path / "run" / ".." / "archive"):
        assert copy_checkpoint(path, target, comm=SERIAL, replace=True).path.name == path.name
        assert os.listdir(tmp_path / "archive") == [path.name]
    with pytest.raises(UsageError, match="choose another directory"):
        copy_checkpoint(path, tmp_path / "run", comm=SERIAL, replace=True)
    for target in (tmp_path / "x.h5", path, saved(tmp_path / "folder", files=2)):
        with pytest.raises(UsageError, match="give the directory in which to create"):
            copy_checkpoint(path, target, comm=SERIAL)
    with pytest.raises(UsageError, match="3 files by 2 ranks"):
        run_threads(2, lambda w: copy_checkpoint(path, tmp_path / "x", comm=w, files=3), timeout_s=300)


def small(directory: Path, *steps: int, **quality: list[float]) -> None:
    for place, step in enumerate(steps):
        document = {"quality": {name: values[place] for name, values in quality.items()}}
        state = State(items=[Replicated(name="large", tensor=torch.arange(100.0))], document=document)
        save(state, directory=directory, step=step, comm=SERIAL, keep=None, files=1 + place % 2)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_prune_keeps_what_it_is_told_to_and_a_dry_run_deletes_nothing(tmp_path: Path) -> None:
    small(tmp_path, 10, 20, 30, 40, 50, loss=[0.5, 0.1, 0.4, 0.3, 0.2])
    before = names(tmp_path)
    retention = Retention(last=1, every_steps=30, best=Best(metric="loss", mode="min"))
    planned = prune(tmp_path, comm=SERIAL, retention=retention, dry_run=True)
    assert names(tmp_path) == before
    done = run_threads(2, lambda world: prune(tmp_path, comm=world, retention=retention), timeout_s=300)
    assert done[0] == done[1] == planned
    assert done[0].deleted == ("step-00000010.h5", "step-00000040")
    assert names(tmp_path) == ["step-00000020", "step-00000030.h5", "step-00000050.h5"]
    assert done[0].kept == ("step-00000050.h5", "step-00000030.h5", "step-00000020")
    assert done[0].freed_bytes > 800


def test_prune_deletes_nothing_before_one_is_proven(tmp_path: Path) -> None:
    small(tmp_path, 10, 20, 30)
    damage(tmp_path / "step-00000030.h5")
    done = prune(tmp_path, comm=SERIAL, retention=Retention(last=1))
    assert done.proven.name == "step-00000020"
    assert done.passed_over[0].startswith("step-00000030.h5: ")
    assert names(tmp_path) == ["step-00000020", "step-00000030.h5"]
    damage(tmp_path / "step-00000020")
    with pytest.raises(CheckpointError, match="all are damaged: step-00000030"):
        prune(tmp_path, comm=SERIAL, retention=Retention(last=1))
    assert names(tmp_path) == ["step-00000020", "step-00000030.h5"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is none"):
        prune(tmp_path / "empty", comm=SERIAL, retention=Retention(last=1))


def test_prune_removes_what_killed_saves_left_only_when_asked(tmp_path: Path) -> None:
    small(tmp_path, 10)
    left = tmp_path / ".step-00000020.partial-0123456789abcdef"
    left.mkdir()
    (left / "data-00000.h5").write_bytes(bytes(5000))
    assert not prune(tmp_path, comm=SERIAL, retention=Retention(last=1)).deleted
    assert left.exists()
    done = prune(tmp_path, comm=SERIAL, retention=Retention(last=1), unfinished=True)
    assert (done.deleted, done.freed_bytes) == ((left.name,), 5000)
    assert names(tmp_path) == ["step-00000010.h5"]
