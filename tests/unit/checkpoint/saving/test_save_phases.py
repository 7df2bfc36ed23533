"""Saving in phases: folders, the background, and what one save leaves for the next."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedParameter

from hpctrain.checkpoint import HostBuffers, Replicated, SaveOptions, Saving, State, load, save
from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
    folder_name,
    partial_files,
    partial_name,
    replaced_name,
)
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.operations.verify import verify
from hpctrain.checkpoint.retention.delete_old import delete_checkpoint
from hpctrain.checkpoint.saving import save as saving_module
from hpctrain.checkpoint.saving.commit import rename_finished
from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
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
        saving = Saving.begin(
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
        saving = Saving.begin(
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

    (told,) = set(run_threads(3, rank_main, timeout_s=60))
    assert "rank 0 as [0, 0, 1]; rank 1 as [0, 1, 1]" in told
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_on_the_nodes_own_storage_no_older_one_is_deleted_before_all_have_the_new_one(tmp_path: Path) -> None:
    options = SaveOptions(files="node", node_of_rank=[0, 1], local=True, keep=1)

    def rank_main(world: ThreadsWorld) -> list[list[str]]:
        directory = tmp_path / f"node{world.rank}"
        found = []
        for step, lost in ((1, False), (2, True), (3, False)):
            saving = Saving.begin(
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
    assert run_threads(2, rank_main, timeout_s=60) == [expected, expected]


def test_no_memory_for_the_copy_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        buffers = HostBuffers()
        if world.rank == 1:
            # The real thing, from torch: more than the machine has addresses for.
            buffers.take = lambda num_bytes, *, pinned=False: torch.empty(2**60, dtype=torch.uint8)  # type: ignore[method-assign]
        saving = Saving.begin(
            state_of(world.rank, 2), directory=tmp_path, step=1, comm=world, buffers=buffers
        )
        with pytest.raises(CheckpointError) as error:
            saving.finish()
        return str(error.value)

    told = run_threads(2, rank_main, timeout_s=60)
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    assert "bytes to host memory for the background save" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_the_layout_is_made_once_for_states_of_one_kind(tmp_path: Path) -> None:
    world = SerialWorld()

    def state(columns: int, **document: str) -> State:
        tensor = torch.full((3, columns), 7.0)
        return State(items=[Replicated(name="w", tensor=tensor)], document=document)

    first, second, wider, longer = state(5), state(5), state(6), state(6, note="x" * 100_000)
    files = []
    for step, made in enumerate([first, second, wider, longer]):
        files.append(save(made, directory=tmp_path, step=step, comm=world, keep=None).path)
        checkpoint, tensors = load(files[-1], comm=world)
        assert same_bits(tensors["w"], made.items[0].tensor)
        assert checkpoint.document == made.document
    sizes = [path.stat().st_size for path in files]
    assert len({load(path, comm=world)[0].metadata.id for path in files}) == 4
    assert sizes[0] == sizes[1]
    assert sizes[3] > sizes[2] + 90_000
    begun = [Saving.begin(made, directory=tmp_path, step=9, comm=world) for made in (first, second, wider)]
    assert begun[0]._files.layout is begun[1]._files.layout
    assert begun[1]._files.layout is not begun[2]._files.layout


def test_a_tensor_of_another_kind_is_laid_out_anew_whoever_writes_it(tmp_path: Path) -> None:
    """Also an empty one, of which nobody writes."""

    def items(*, changed: int, to: torch.Tensor) -> list[Replicated]:
        found = [Replicated(name=f"t{i}", tensor=torch.full((40, 3), float(i))) for i in range(6)]
        found.append(Replicated(name="t6", tensor=torch.empty(0, 3)))
        found[changed] = Replicated(name=f"t{changed}", tensor=to)
        return found

    def rank_main(world: ThreadsWorld) -> None:
        step = 0
        usual = items(changed=0, to=torch.full((40, 3), 0.0))
        for changed in range(7):
            for to in (torch.full((3, 41), 7.0), torch.full((40, 3), 7, dtype=torch.int64), torch.zeros(0)):
                comm = world.duplicate()  # one that has not been surprised yet
                odd = items(changed=changed, to=to)
                for made in (usual, odd, usual, odd, odd):
                    step += 1
                    path = save(State(items=made), directory=tmp_path, step=step, comm=comm, keep=1).path
                    assert not list(tmp_path.glob(".*"))
                    _, loaded = load(path, comm=comm)
                    assert all(same_bits(loaded[item.name], item.tensor) for item in made)

    run_threads(3, rank_main, timeout_s=120)


@pytest.mark.parametrize("how", ["at once", "copied", "two files", "in the background"])
def test_a_replica_of_another_kind_is_told_in_a_later_save_too(tmp_path: Path, how: str) -> None:
    """Whether the rank whose replica it is writes of it or not: t0 is written by rank 0, t3 by rank 1, t4 by none."""
    options = SaveOptions(files=2 if how == "two files" else 1)

    def rank_main(world: ThreadsWorld) -> list[str]:
        def save_it(odd: dict[int, torch.Tensor], *, step: int, comm: World) -> Path:
            tensors = [torch.full((2048,), float(step + i)) for i in range(4)] + [torch.empty(0)]
            if world.rank == 1:
                tensors = [odd.get(i, tensor) for i, tensor in enumerate(tensors)]
            state = State(items=[Replicated(name=f"t{i}", tensor=tensor) for i, tensor in enumerate(tensors)])
            with ThreadPoolExecutor(1) as executor:
                saving = Saving.begin(
                    state, directory=tmp_path, step=step, comm=comm, options=options,
                    buffers=HostBuffers() if how == "copied" else None,
                    executor=executor if how == "in the background" else None,
                )  # fmt: skip
                return saving.finish().path

        step, told = 0, []
        for odd in (torch.zeros(7), torch.zeros(2048, 1), torch.zeros(2048, dtype=torch.int32)):
            for changed in (0, 3, 4):
                comm = world.duplicate()  # one that has not been surprised yet
                for _ in range(2):
                    path = save_it({}, step=step, comm=comm)
                    with pytest.raises(
                        CheckpointError, match=f"replicated tensors differ: 't{changed}'"
                    ) as error:
                        save_it({changed: odd}, step=step + 1, comm=comm)
                    told.append(str(error.value))
                    world.barrier()
                    assert finished_newest_first(tmp_path)[0] == path
                    assert not list(tmp_path.glob(".*"))  # nothing half-written is left
                    world.barrier()
                    step += 2
        return told

    first, second = run_threads(2, rank_main, timeout_s=60)
    assert first == second


@pytest.mark.parametrize("how", ["at once", "in the background", "copied"])
def test_a_changed_tensor_costs_one_save_begun_anew_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where tensors are taken later, or have been copied, they are looked at first."""
    made: list[str] = []
    begin = saving_module.begin_partial

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args[1])
        return begin(*args, **options)

    monkeypatch.setattr(saving_module, "begin_partial", counted)
    world = SerialWorld()
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float64, torch.int32]
    with ThreadPoolExecutor(1) as executor:
        for step, dtype in enumerate(dtypes):
            tensors = [torch.full((700, 40), step, dtype=dtype), *torch.full((50, 3), float(step))]
            state = State(items=[Replicated(name=f"t{i:02}", tensor=t) for i, t in enumerate(tensors)])
            begun = Saving.begin(
                state, directory=tmp_path, step=step, comm=world,
                executor=None if how == "at once" else executor,
                buffers=HostBuffers() if how == "copied" else None,
            )  # fmt: skip
            _, loaded = load(begun.finish().path, comm=world)
            assert all(same_bits(loaded[item.name], item.tensor) for item in state.items)
    again = int(how == "at once")
    assert [made.count(f"step-{step:08}.h5") for step in range(6)] == [1, 1, 1 + again, 1, 1, 1]


def test_a_save_that_begins_anew_and_fails_leaves_what_had_its_name(tmp_path: Path) -> None:
    """On the nodes' own storage, where each node renames its own."""
    options = SaveOptions(files="node", node_of_rank=(0, 1), local=True)

    def rank_main(world: ThreadsWorld) -> None:
        directory = tmp_path / str(world.rank)

        def save_it(odd: torch.Tensor) -> None:
            tensors = [torch.full((2048,), 1.0), torch.full((2048,), 2.0), odd]
            items = [Replicated(name=f"t{i}", tensor=tensor) for i, tensor in enumerate(tensors)]
            Saving.begin(
                State(items=items), directory=directory, step=1, comm=world, options=options
            ).finish()

        save_it(torch.zeros(4))
        before = {path: path.stat().st_ino for path in directory.rglob("*")}
        for odd in (torch.zeros(4 + world.rank), torch.zeros(4).to_sparse(), UninitializedParameter()):
            with pytest.raises(CheckpointError):
                save_it(odd)
            assert {path: path.stat().st_ino for path in directory.rglob("*")} == before

    run_threads(2, rank_main, timeout_s=60)


def test_a_tensor_that_changes_while_it_is_saved_is_an_error(tmp_path: Path) -> None:
    """Where saving in the background the caller has promised that it does not."""
    world, tensor = SerialWorld(), torch.zeros(5, 5)
    state = State(items=[Replicated(name="w", tensor=tensor)])
    path = save(state, directory=tmp_path, step=1, comm=world).path
    late: Future[Any] = Future()

    class Later(Executor):
        def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
            tensor.resize_(7)
            try:
                late.set_result(work())
            except HpctrainError as error:
                late.set_exception(error)
            return late

    begun = Saving.begin(state, directory=tmp_path, step=2, comm=world, executor=Later())
    with pytest.raises(CheckpointError, match="changed during the save"):
        begun.finish()
    assert list(tmp_path.iterdir()) == [path]


def test_states_that_take_turns_are_laid_out_once_each_whoever_writes_what_differs(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> int:
        layouts = []
        for step in range(9):
            kinds = [torch.int32 if step % 2 else torch.float32, *[torch.float32] * 3]
            items = [
                Replicated(name=f"t{i}", tensor=torch.full((2048,), step + i, dtype=kind))
                for i, kind in enumerate(kinds)
            ]
            saving = Saving.begin(State(items=items), directory=tmp_path, step=step, comm=world)
            layouts.append(saving._files.layout)
            _, loaded = load(saving.finish().path, comm=world)
            assert all(same_bits(loaded[item.name], item.tensor) for item in items)
        return len(set(map(id, layouts)))

    assert run_threads(2, rank_main, timeout_s=60) == [2, 2]


def test_a_document_that_is_no_json_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        tensor = Replicated(name="w", tensor=torch.zeros(3))
        save(State(items=[tensor], document={"a": 1}), directory=tmp_path, step=1, comm=world)
        document = {"a": object() if world.rank == 1 else 1}
        with pytest.raises(CheckpointError, match="must be JSON") as error:
            save(State(items=[tensor], document=document), directory=tmp_path, step=2, comm=world)
        return str(error.value)

    told = run_threads(2, rank_main, timeout_s=60)
    assert all("rank 1" in text for text in told)


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


def test_a_commit_that_fails_leaves_the_older_one_its_name(tmp_path: Path) -> None:
    for options in ({}, {"files": 2}):
        kept = save(state_of(0, 1), directory=tmp_path, step=5, comm=SerialWorld(), **options).path
        lost = tmp_path / partial_name(folder_name(5), unique="0" * 16)
        with pytest.raises(CheckpointError, match="No such file"):
            rename_finished(lost, tmp_path / folder_name(5), unique="0" * 16)
        assert list(tmp_path.iterdir()) == [kept]


def test_what_cannot_be_removed_is_told_and_no_reason_not_to_save() -> None:
    state = state_of(0, 1)
    with tempfile.TemporaryDirectory() as name:  # pytest's own lets nobody else in
        directory = Path(name)
        save(state, directory=directory, step=4, comm=SerialWorld())
        left = directory / partial_name(folder_name(5), unique="0" * 16)
        left.mkdir()
        (left / "data-00000.h5").touch()
        left.chmod(0o555)
        root = os.geteuid() == 0
        try:
            if root:  # may remove everything
                os.chown(directory, 65534, -1)
                os.seteuid(65534)
            result = save(state, directory=directory, step=5, comm=SerialWorld())
        finally:
            if root:
                os.seteuid(0)
            left.chmod(0o755)
        assert f"could not remove {left.name}, left by an earlier save: Permission denied" in result.note
        assert finished_newest_first(directory)[0] == result.path
        save(state, directory=directory, step=6, comm=SerialWorld())
        assert not left.exists()


def test_half_of_a_replaced_folder_that_is_no_longer_kept_is_removed_by_the_next_save(tmp_path: Path) -> None:
    replaced = tmp_path / replaced_name(folder_name(5), unique="0" * 16)
    (replaced / "data-00000.h5").mkdir(parents=True)  # what is there does not matter
    doomed: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", doomed.append)  # killed before
        delete_checkpoint(replaced)
    assert doomed == partial_files(tmp_path)


def test_an_error_in_the_background_reaches_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        state = state_of(world.rank, world.num_ranks)
        gate = threading.Event()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(gate.wait)
            saving = Saving.begin(
                state, directory=tmp_path, step=1, comm=world, options=SaveOptions(files=2),
                buffers=HostBuffers(), executor=executor,
            )  # fmt: skip
            if world.rank == 2:  # its file is gone before it writes
                (made,) = tmp_path.glob(".step-*.partial-*/data-00001.h5")
                made.unlink()
            world.barrier()
            gate.set()
            with pytest.raises(CheckpointError) as caught:
                saving.finish()
        world.barrier()
        return str(caught.value)

    texts = run_threads(3, rank_main)
    assert len(set(texts)) == 1
    assert "rank 2" in texts[0]
    assert "data-00001.h5" in texts[0]
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_error_and_the_process_goes_on(tmp_path: Path) -> None:
    world = SerialWorld()
    state = State(items=[Replicated(name="w", tensor=torch.zeros(1 << 20))])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="limit on file sizes"):
            save(state, directory=tmp_path, step=1, comm=world)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert (
        load(save(state, directory=tmp_path, step=1, comm=world).path, comm=world)[1]["w"].numel() == 1 << 20
    )


def test_metadata_that_no_reader_takes_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.checkpoint.planning.metadata_template.MAX_METADATA_BYTES", 20_000)

    def rank_main(world: ThreadsWorld) -> None:
        def state(note: str) -> State:
            return State(items=[Replicated(name="w", tensor=torch.zeros(8))], document={"note": note})

        save(state("x"), directory=tmp_path, step=1, comm=world)
        with pytest.raises(CheckpointError, match="the limit is 20000"):
            save(state("x" * 30_000), directory=tmp_path, step=2, comm=world)

    run_threads(2, rank_main)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.h5"]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"files": 0}, "files = 0"), ({"files": "nodes"}, "files = 'nodes'"), ({"files": "node"}, "node_of_rank lists 0"),
     ({"local": True}, 'files = "node"'), ({"limit_mb_per_s": 0.0}, "limit_mb_per_s = 0.0"),
     ({"page_cache": "never"}, "page_cache = 'never'"),
     ({"engine": "mpio", "page_cache": "bypass"}, "does not apply to engine")],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        save(state_of(0, 1), directory=tmp_path, step=1, comm=SerialWorld(), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_memory_for_the_copy_is_an_error_on_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
        raise CheckpointError("there is no memory for a tensor")

    monkeypatch.setattr("hpctrain.checkpoint.saving.host_snapshot.fresh_tensor", no_memory)

    def rank_main(world: ThreadsWorld) -> None:
        buffers = HostBuffers()
        if world.rank == 0:
            monkeypatch.setattr(
                buffers, "take", lambda num_bytes, **_: torch.empty(num_bytes, dtype=torch.uint8)
            )
        with ThreadPoolExecutor(1) as executor:
            saving = Saving.begin(
                state_of(world.rank, 2),
                directory=tmp_path,
                step=1,
                comm=world,
                buffers=buffers,
                executor=executor,
            )
            with pytest.raises(CheckpointError, match=r"rank 1.*no memory for a tensor"):
                saving.finish()

    run_threads(2, rank_main)
    assert finished_newest_first(tmp_path) == []


def test_small_tensors_without_memory_of_their_own_are_refused_and_odd_ones_saved(tmp_path: Path) -> None:
    freed = torch.rand(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="no memory of its own"):
        save(
            State(items=[Replicated(name="freed", tensor=freed)]),
            directory=tmp_path,
            step=1,
            comm=SerialWorld(),
        )
    base = torch.randn(6, 8, dtype=torch.complex64)
    odd = {
        "conjugate": base.conj(), "negative": base.conj().imag, "turned": torch.rand(5, 7).T,
        "spread": torch.rand(1, 3).expand(4, 3), "parameter": torch.nn.Parameter(torch.rand(9)),
        "later": torch.arange(50)[20:], "scalar": torch.tensor(3.0), "half": torch.rand(11).bfloat16(),
    }  # fmt: skip
    items = [Replicated(name=name, tensor=tensor) for name, tensor in odd.items()]
    save(State(items=items), directory=tmp_path, step=2, comm=SerialWorld())
    _, tensors = load(tmp_path / "step-00000002.h5", comm=SerialWorld())
    assert all(same_bits(tensors[name], tensor.detach().contiguous()) for name, tensor in odd.items())
