"""File layouts are made once for states of one kind, and made again when a tensor changes its kind."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedParameter

from hpctrain.checkpoint import CheckpointSave, HostBuffers, Replicated, SaveOptions, State, load, save
from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
)
from hpctrain.checkpoint.planning import file_layout
from hpctrain.checkpoint.planning.file_layout import agree_on_plan
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError, HpctrainError
from tests.unit.checkpoint.states import same_bits


@pytest.fixture
def planned_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose saves made a new layout, once per rank."""
    steps: list[int] = []

    def counted(*args: Any, step: int, **options: Any) -> Any:
        steps.append(step)
        return agree_on_plan(*args, step=step, **options)

    monkeypatch.setattr(file_layout, "agree_on_plan", counted)
    return steps


def test_the_layout_is_made_once_for_states_of_one_kind(tmp_path: Path, planned_steps: list[int]) -> None:
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
    # The last document is longer than the space that the layout of `wider` reserves for metadata.
    assert planned_steps == [0, 2, 3]


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
                odd = items(changed=changed, to=to)
                for made in (usual, odd, usual, odd, odd):
                    step += 1
                    path = save(State(items=made), directory=tmp_path, step=step, comm=world, keep=1).path
                    assert not list(tmp_path.glob(".*"))
                    _, loaded = load(path, comm=world)
                    assert all(same_bits(loaded[item.name], item.tensor) for item in made)

    run_threads(3, rank_main, timeout_s=300)


@pytest.mark.parametrize("how", ["at once", "copied", "two files", "in the background"])
def test_a_replica_of_another_kind_is_reported_in_a_later_save_too(tmp_path: Path, how: str) -> None:
    """Whether the rank whose replica it is writes of it or not: t0 is written by rank 0, t3 by rank 1, t4 by none."""
    options = SaveOptions(files=2 if how == "two files" else 1)

    def rank_main(world: ThreadsWorld) -> list[str]:
        def save_it(odd: dict[int, torch.Tensor], *, step: int) -> Path:
            tensors = [torch.full((2048,), float(step + i)) for i in range(4)] + [torch.empty(0)]
            if world.rank == 1:
                tensors = [odd.get(i, tensor) for i, tensor in enumerate(tensors)]
            state = State(items=[Replicated(name=f"t{i}", tensor=tensor) for i, tensor in enumerate(tensors)])
            with ThreadPoolExecutor(1) as executor:
                saving = CheckpointSave.begin(
                    state, directory=tmp_path, step=step, comm=world, options=options,
                    buffers=HostBuffers() if how == "copied" else None,
                    executor=executor if how == "in the background" else None,
                )  # fmt: skip
                return saving.finish().path

        step, reported = 0, []
        for odd in (torch.zeros(7), torch.zeros(2048, 1), torch.zeros(2048, dtype=torch.int32)):
            for changed in (0, 3, 4):
                for _ in range(2):
                    path = save_it({}, step=step)
                    with pytest.raises(
                        CheckpointError, match=f"replicated tensors differ: 't{changed}'"
                    ) as error:
                        save_it({changed: odd}, step=step + 1)
                    reported.append(str(error.value))
                    world.barrier()
                    assert finished_newest_first(tmp_path)[0] == path
                    assert not list(tmp_path.glob(".*"))  # nothing half-written is left
                    world.barrier()
                    step += 2
        return reported

    first, second = run_threads(2, rank_main, timeout_s=300)
    assert first == second


def test_a_state_that_cannot_be_saved_leaves_the_older_checkpoint_of_the_step(tmp_path: Path) -> None:
    """On the nodes' own storage, where each node renames its own."""
    options = SaveOptions(files="node", node_of_rank=(0, 1), local=True)

    def rank_main(world: ThreadsWorld) -> None:
        directory = tmp_path / str(world.rank)

        def save_it(odd: torch.Tensor) -> None:
            tensors = [torch.full((2048,), 1.0), torch.full((2048,), 2.0), odd]
            items = [Replicated(name=f"t{i}", tensor=tensor) for i, tensor in enumerate(tensors)]
            CheckpointSave.begin(
                State(items=items), directory=directory, step=1, comm=world, options=options
            ).finish()

        save_it(torch.zeros(4))
        before = {path: path.stat().st_ino for path in directory.rglob("*")}
        for odd in (torch.zeros(4 + world.rank), torch.zeros(4).to_sparse(), UninitializedParameter()):
            with pytest.raises(CheckpointError):
                save_it(odd)
            assert {path: path.stat().st_ino for path in directory.rglob("*")} == before

    run_threads(2, rank_main, timeout_s=300)


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

    begun = CheckpointSave.begin(state, directory=tmp_path, step=2, comm=world, executor=Later())
    with pytest.raises(CheckpointError, match="changed during the save"):
        begun.finish()
    assert list(tmp_path.iterdir()) == [path]


def test_states_that_take_turns_are_laid_out_once_each_whoever_writes_what_differs(
    tmp_path: Path, planned_steps: list[int]
) -> None:
    def rank_main(world: ThreadsWorld) -> None:
        for step in range(9):
            kinds = [torch.int32 if step % 2 else torch.float32, *[torch.float32] * 3]
            items = [
                Replicated(name=f"t{i}", tensor=torch.full((2048,), step + i, dtype=kind))
                for i, kind in enumerate(kinds)
            ]
            path = save(State(items=items), directory=tmp_path, step=step, comm=world).path
            _, loaded = load(path, comm=world)
            assert all(same_bits(loaded[item.name], item.tensor) for item in items)

    run_threads(2, rank_main, timeout_s=300)
    assert sorted(planned_steps) == [0, 0, 1, 1]
