"""Saving in phases: folders, the background, and checkpoints that replace each other."""

from __future__ import annotations

import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import CheckpointSave, HostBuffers, Replicated, SaveOptions, State, load, save
from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
    folder_name,
    partial_files,
    replaced_name,
)
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.checkpoint.retention.delete_old import delete_checkpoint
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError
from tests.unit.checkpoint.format.test_file_as_others_read_it import DOCUMENT
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by 4 ranks as 3 files."""
    directory = tmp_path_factory.mktemp("folder")

    def rank_main(world: ThreadsWorld) -> Path:
        state = state_of(world.rank, world.num_ranks)
        return save(state, directory=directory, step=50, comm=world, files=3).path

    return run_threads(4, rank_main)[0]


def test_the_documented_script_reads_a_folder_with_h5py_alone(folder: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1]
    assert "hpctrain" not in script
    names: dict[str, object] = {}
    exec(script.replace('"step-00000050"', repr(str(folder))), names)
    tensors = names["tensors"]
    assert isinstance(tensors, dict)
    assert sorted(tensors) == sorted(whole_tensors())
    for name, tensor in whole_tensors().items():
        assert same_bits(tensors[name], tensor), name


def test_a_folder_verifies_and_loads(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [f"data-0000{i}.h5" for i in range(3)]
    (verified,) = verify(folder, comm=SerialWorld())
    assert verified.damage == ()
    _, tensors = load(folder, comm=SerialWorld())
    assert all(same_bits(tensors[name], tensor) for name, tensor in whole_tensors().items())


def test_a_state_that_changes_after_begin_is_saved_as_it_was(tmp_path: Path) -> None:
    world = SerialWorld()
    state = state_of(0, 1)
    buffers = HostBuffers()
    gate = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(gate.wait)  # the work cannot begin before the state has changed
        saving = CheckpointSave.begin(
            state, directory=tmp_path, step=1, comm=world, buffers=buffers, executor=executor
        )
        assert not saving.ready()
        assert finished_newest_first(tmp_path) == []
        for item in state.items:
            item.tensor.zero_()
        gate.set()
        assert saving.advance() is None
        result = saving.advance()
    assert result is not None
    tensors = whole_tensors().values()
    gaps = 4096 * (len(tensors) + 1)  # each may begin at the block's byte at which it lies in the file
    assert buffers.num_bytes <= sum(tensor.nbytes for tensor in tensors) + gaps
    _, tensors = load(result.path, comm=world)
    assert all(same_bits(tensors[name], tensor) for name, tensor in whole_tensors().items())


def test_a_document_that_changes_after_begin_is_saved_as_it_was(tmp_path: Path) -> None:
    losses = [3.0]
    state = State(
        items=[Replicated(name="w", tensor=torch.ones(3))],
        document={"losses": losses},
        parent={"step": losses},
    )
    gate = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(gate.wait)
        saving = CheckpointSave.begin(
            state, directory=tmp_path, step=1, comm=SerialWorld(), buffers=HostBuffers(), executor=executor
        )
        losses.append(2.0)
        gate.set()
        result = saving.finish()
    metadata = read_structure(result.path).metadata
    assert metadata.document == {"losses": [3.0]}
    assert metadata.parent == {"step": [3.0]}


def test_ranks_that_mean_other_files_all_fail(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        save(state_of(world.rank, 3), directory=tmp_path, step=1, comm=world, files=2)
        nodes = [0, 0, 1] if world.rank == 0 else [0, 1, 1]
        with pytest.raises(CheckpointError) as error:
            save(
                state_of(world.rank, 3),
                directory=tmp_path,
                step=2,
                comm=world,
                files="node",
                node_of_rank=nodes,
            )
        return str(error.value)

    (reported,) = set(run_threads(3, rank_main, timeout_s=300))
    assert "rank 0 as [0, 0, 1]; rank 1 as [0, 1, 1]" in reported
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_on_the_nodes_own_storage_no_older_one_is_deleted_before_all_have_the_new_one(tmp_path: Path) -> None:
    options = SaveOptions(files="node", node_of_rank=[0, 1], local=True, keep=1)

    def rank_main(world: ThreadsWorld) -> list[list[str]]:
        directory = tmp_path / f"node{world.rank}"
        found = []
        for step, lost in ((1, False), (2, True), (3, False)):
            saving = CheckpointSave.begin(
                state_of(world.rank, 2), directory=directory, step=step, comm=world, options=options
            )
            if lost and world.rank == 0:  # what it cannot be committed without
                (partial,) = partial_files(directory)
                (partial / "data-00000.h5").unlink()
            if lost:
                with pytest.raises(CheckpointError):
                    saving.finish()
            else:
                saving.finish()
            found.append([path.name for path in directory.iterdir()])
        return found

    expected = [["step-00000001"], ["step-00000001"], ["step-00000003"]]
    assert run_threads(2, rank_main, timeout_s=300) == [expected, expected]


def test_a_file_and_a_folder_of_one_step_replace_each_other(tmp_path: Path) -> None:
    world = SerialWorld()
    for value, files in enumerate((1, 2, 1, 1, 2, 2)):
        name = "step-00000003" + (".h5" if files == 1 else "")
        state = State(items=[Replicated(name="w", tensor=torch.tensor([value]))])
        path = save(state, directory=tmp_path, step=3, comm=world, files=files).path
        assert path.name == name
        assert finished_newest_first(tmp_path) == [path]
        assert [p.name for p in tmp_path.iterdir()] == [name]
        assert load(path, comm=world)[1]["w"].item() == value


def test_one_that_was_being_replaced_counts_until_the_new_one_has_its_name(tmp_path: Path) -> None:
    world = SerialWorld()
    state = State(items=[Replicated(name="w", tensor=torch.tensor([1]))])
    path = save(state, directory=tmp_path, step=3, comm=world, files=2).path
    aside = path.rename(tmp_path / f".{path.name}.replaced-{'0' * 16}")
    assert finished_newest_first(tmp_path) == [aside]
    assert partial_files(tmp_path) == []
    assert load(aside, comm=world)[1]["w"].item() == 1
    save(state, directory=tmp_path, step=3, comm=world, files=2)
    assert finished_newest_first(tmp_path) == [path]
    save(state, directory=tmp_path, step=4, comm=world, files=2)
    assert not aside.exists()


def test_half_of_a_replaced_folder_that_is_no_longer_kept_is_removed_by_the_next_save(tmp_path: Path) -> None:
    replaced = tmp_path / replaced_name(folder_name(5), unique="0" * 16)
    (replaced / "data-00000.h5").mkdir(parents=True)  # what is there does not matter
    doomed: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", doomed.append)  # killed before
        delete_checkpoint(replaced)
    assert doomed == partial_files(tmp_path)
