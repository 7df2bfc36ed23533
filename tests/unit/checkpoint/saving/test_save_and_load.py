"""Saving and loading with ranks as threads: what goes in comes out, on any number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain.checkpoint import (
    CheckpointSave,
    HostBuffers,
    Replicated,
    State,
    TensorShard,
    load,
    load_newest_good,
    open_checkpoint,
    save,
)
from hpctrain.checkpoint.format.dtypes import _BY_NAME, byte_view, escape
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.states import SHARDED, same_bits, state_of, whole_tensors

TIMEOUT_S = 300


def save_with(num_ranks: int, directory: Path, *, step: int = 1, **options: Any) -> list[Any]:
    def rank_main(world: World) -> Any:
        state = state_of(world.rank, world.num_ranks)
        return save(state, directory=directory, step=step, comm=world, **options)

    return run_threads(num_ranks, rank_main, timeout_s=TIMEOUT_S)


def save_alone(items: dict[str, torch.Tensor], directory: Path, *, step: int = 1, **document: Any) -> Path:
    replicated = [Replicated(name=name, tensor=tensor) for name, tensor in items.items()]
    state = State(items=replicated, document=document)
    return save(state, directory=directory, step=step, comm=SerialWorld()).path


def datasets_of(path: Path) -> dict[str, bytes]:
    with h5py.File(path, "r") as file:
        return {name: np.asarray(dataset[()]).tobytes() for name, dataset in file["tensors"].items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_what_was_saved_comes_back_on_every_number_of_ranks(tmp_path: Path, num_ranks: int) -> None:
    results = save_with(num_ranks, tmp_path, step=50)
    assert {result.path for result in results} == {tmp_path / "step-00000050.h5"}
    assert results[0].bytes == results[0].path.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000050.h5"]

    def rank_main(world: World) -> None:
        restored = load_newest_good(tmp_path, comm=world)
        assert restored is not None
        assert restored.checkpoint.step == 50
        assert restored.checkpoint.document == dict(state_of(0, 1).document)
        assert restored.rejected == ()
        expected = whole_tensors()
        assert set(restored.tensors) == set(expected)
        for name, tensor in expected.items():
            assert same_bits(restored.tensors[name], tensor), name

    for loading_ranks in (1, 2, 3, 4):
        run_threads(loading_ranks, rank_main, timeout_s=TIMEOUT_S)


def test_datasets_are_the_same_bytes_for_every_number_of_ranks(tmp_path: Path) -> None:
    for num_ranks in (1, 2, 3, 4):
        save_with(num_ranks, tmp_path / str(num_ranks))
    first, *others = [datasets_of(tmp_path / str(n) / "step-00000001.h5") for n in (1, 2, 3, 4)]
    assert len(first) == len(whole_tensors())
    assert all(other == first for other in others)


def test_each_rank_restores_only_its_shards_on_another_number_of_ranks(tmp_path: Path) -> None:
    save_with(4, tmp_path)

    def rank_main(world: World) -> None:
        shards = [item for item in state_of(world.rank, 3).items if isinstance(item, TensorShard)]
        regions = {s.name: (s.offset, tuple(s.tensor.shape)) for s in shards if s.name != "grid"}
        restored = load_newest_good(tmp_path, comm=world, regions=regions)
        assert restored is not None
        for shard in shards:
            found = restored.tensors[shard.name]
            if shard.name == "grid":  # two boxes per rank: read one by one
                found = restored.checkpoint.read("grid", offset=shard.offset, shape=tuple(shard.tensor.shape))
            assert same_bits(found, shard.tensor), shard.name

    run_threads(3, rank_main, timeout_s=TIMEOUT_S)


def test_several_boxes_of_a_tensor_arrive_as_one(tmp_path: Path) -> None:
    rows = torch.arange(60.0).reshape(10, 6)
    checkpoint = open_checkpoint(save_alone({"rows": rows}, tmp_path), comm=SerialWorld())
    found = checkpoint.read_all(regions={"rows": [((7, 1), (2, 3)), ((0, 1), (1, 3))]})
    assert torch.equal(found["rows"], torch.cat([rows[7:9, 1:4], rows[:1, 1:4]]))
    assert checkpoint.read_all(regions={"rows": [((4, 0), (0, 6))]})["rows"].shape == (0, 6)


def test_any_box_of_any_tensor_can_be_read(tmp_path: Path) -> None:
    save_with(3, tmp_path)
    checkpoint = open_checkpoint(tmp_path, comm=SerialWorld())
    choose = np.random.default_rng(0)
    for name, tensor in whole_tensors().items():
        for _ in range(10):
            offset = tuple(int(choose.integers(0, n + 1)) for n in tensor.shape)
            shape = tuple(
                int(choose.integers(0, n - o + 1)) for n, o in zip(tensor.shape, offset, strict=True)
            )
            index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            assert same_bits(checkpoint.read(name, offset=offset, shape=shape), tensor[index]), name


def test_asking_for_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_alone({"w": torch.ones(3, 2)}, tmp_path), comm=SerialWorld())
    with pytest.raises(CheckpointError, match="has no tensor 'v'; it has 'w'"):
        checkpoint.read("v")
    for offset, shape in [((2, 0), (2, 2)), ((-1, 0), (1, 2)), ((0,), (3,)), ((0, 0), (4, 2))]:
        with pytest.raises(CheckpointError, match=r"'w' has shape \[3, 2\]"):
            checkpoint.read("w", offset=offset, shape=shape)
    with pytest.raises(CheckpointError, match="has no tensor 'v'"):
        load(checkpoint.path, comm=SerialWorld(), regions={"v": ((0,), (1,))})


def test_every_dtype_of_torch_is_stored_bit_for_bit(tmp_path: Path) -> None:
    choose = torch.Generator().manual_seed(3)
    tensors = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, dtype in _BY_NAME.items():
            highest = 2 if dtype is torch.bool else 256
            raw = torch.randint(0, highest, (6 * dtype.itemsize,), dtype=torch.uint8, generator=choose)
            tensors[name] = raw.view(dtype)
            tensors[f"{name}.scalar"] = raw[: dtype.itemsize].view(dtype).reshape(())
            tensors[f"{name}.empty"] = torch.empty(0, 2, dtype=dtype)
        path = save_alone(tensors, tmp_path)
        loaded = open_checkpoint(path, comm=SerialWorld())
        for name, tensor in tensors.items():
            found = loaded.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(byte_view(found), byte_view(tensor)), name
    assert {"bfloat16", "float8_e4m3fn", "complex32", "bool", "uint64"} <= set(tensors)
    with h5py.File(path, "r") as file:
        assert file["tensors/bfloat16"].attrs["torch_dtype"] == "bfloat16"
        assert file["tensors/bfloat16"].dtype == np.uint16
        assert file["tensors/float8_e5m2"].dtype == np.uint8
        assert file["tensors/float32"].dtype == np.float32
        assert "torch_dtype" not in file["tensors/float32"].attrs
        assert file["tensors/bool"].dtype == np.bool_


def test_the_place_of_a_shard_may_be_of_numpy_numbers(tmp_path: Path) -> None:
    def rank_main(world: World) -> Path:
        offset, shape = (np.int64(2 * world.rank),), (np.int32(4),)
        shard = TensorShard(name="s", tensor=torch.full((2,), world.rank), global_shape=shape, offset=offset)  # type: ignore[arg-type]
        return save(State(items=[shard]), directory=tmp_path, step=1, comm=world).path

    _, tensors = load(run_threads(2, rank_main)[0], comm=SerialWorld())
    assert tensors["s"].tolist() == [0, 0, 1, 1]


def test_names_with_any_characters_are_stored(tmp_path: Path) -> None:
    names = ["", ".", "..", "/", "a/b/c", "//", "%", "%2F", "größe", "重み", "🙂", " ", "a b", "\n", "\0x"]
    names += ["\ud800", "x" * 4000, "..a", "'\"\\", "metadata", "tensors"]
    tensors = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    checkpoint = open_checkpoint(save_alone(tensors, tmp_path), comm=SerialWorld())
    assert set(checkpoint.tensors) == set(names)
    with h5py.File(checkpoint.path, "r") as file:
        for name, tensor in tensors.items():
            assert same_bits(checkpoint.read(name), tensor)
            assert file["tensors"][escape(name)][0] == tensor.item()


def test_a_name_that_hdf5_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name is 70000 bytes long"):
        save_alone({"x" * 70_000: torch.ones(1)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_conjugate_negative_and_tied_tensors_are_stored_as_they_read(tmp_path: Path) -> None:
    values = torch.randn(5, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.ones(4, 2))
    tensors = {"conj": values.conj(), "imag": values.conj().imag, "tied.a": weight, "tied.b": weight}
    checkpoint = open_checkpoint(save_alone(tensors, tmp_path), comm=SerialWorld())
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor.detach()), name


def test_one_element_out_of_many_is_stored_whatever_its_stride(tmp_path: Path) -> None:
    values = torch.arange(12.0).view(3, 4)
    tensors = {str(dtype): values.to(dtype).view(-1)[1::5][:1] for dtype in (torch.bfloat16, torch.float64)}
    tensors["column"] = values.to(torch.complex64).t()[1:2, 2:]
    assert [tensor.stride()[-1] for tensor in tensors.values()] == [5, 5, 4]
    for buffers in (None, HostBuffers()):
        state = State(items=[Replicated(name=name, tensor=tensor) for name, tensor in tensors.items()])
        saving = CheckpointSave.begin(state, directory=tmp_path, step=1, comm=SerialWorld(), buffers=buffers)
        _, loaded = load(saving.finish().path, comm=SerialWorld())
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_tensors_without_plain_memory_are_refused_in_words(tmp_path: Path) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(CheckpointError, match="only dense tensors"):
            save_alone({"w": tensor}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_state_without_any_tensor_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_alone({}, tmp_path, place=[1, 2]), comm=SerialWorld())
    assert dict(checkpoint.document) == {"place": [1, 2]}
    assert dict(checkpoint.tensors) == {}


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save_alone({"w": torch.zeros(3)}, tmp_path)
    save_alone({"w": torch.ones(3)}, tmp_path)
    assert open_checkpoint(tmp_path, comm=SerialWorld()).read("w").tolist() == [1, 1, 1]


def test_the_last_checkpoints_are_kept_and_a_later_branch_is_left_alone(tmp_path: Path) -> None:
    def steps() -> list[int]:
        return sorted(int(path.stem[5:]) for path in tmp_path.glob("step-*.h5"))

    for step in (10, 20, 30, 40):
        save_with(2, tmp_path, step=step, keep=2)
    assert steps() == [30, 40]
    save_with(2, tmp_path, step=35, keep=2)  # a run that went on from step 30
    assert steps() == [30, 35, 40]
    save_with(2, tmp_path, step=36, keep=1)
    assert steps() == [36, 40]
    save_with(2, tmp_path, step=100, keep=None)
    assert steps() == [36, 40, 100]


def test_what_a_killed_save_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / ".step-00000007.h5.partial-0123456789abcdef"
    foreign = [tmp_path / "notes.txt", tmp_path / ".step-7.h5.partial-x", tmp_path / "step-00000007.h5.bak"]
    for path in (left, *foreign):
        path.write_bytes(b"half")
    save_with(2, tmp_path)
    assert not left.exists()
    assert all(path.read_bytes() == b"half" for path in foreign)


def fails_everywhere(num_ranks: int, directory: Path, make_state: Any) -> str:
    """Save; every rank must raise the same agreed CheckpointError. Its text."""
    texts = set()

    def rank_main(world: World) -> None:
        with pytest.raises(CheckpointError) as caught:
            save(make_state(world), directory=directory, step=2, comm=world)
        assert caught.value.agreed
        texts.add(str(caught.value))
        world.barrier()

    run_threads(num_ranks, rank_main, timeout_s=TIMEOUT_S)
    assert len(texts) == 1
    return texts.pop()


def test_ranks_whose_states_differ_all_fail_and_name_the_tensor(tmp_path: Path) -> None:
    def missing(world: World) -> State:
        items = [Replicated(name="w", tensor=torch.ones(2))]
        return State(items=items if world.rank != 1 else [])

    def other_dtype(world: World) -> State:
        dtype = torch.float64 if world.rank == 2 else torch.float32
        return State(items=[Replicated(name="w", tensor=torch.ones(2, dtype=dtype))])

    def gap(world: World) -> State:
        return State(
            items=[TensorShard(name="s", tensor=torch.ones(1), global_shape=(4,), offset=(world.rank,))]
        )

    def outside(world: World) -> State:
        return State(
            items=[TensorShard(name="s", tensor=torch.ones(2), global_shape=(3,), offset=(world.rank,))]
        )

    def flat(world: World) -> State:
        offset = (world.rank,) if world.rank == 1 else (world.rank, 0)
        return State(
            items=[TensorShard(name="s", tensor=torch.ones(1, 2), global_shape=(3, 2), offset=offset)]
        )

    def fraction(world: World) -> State:
        offset = 1.0 if world.rank == 1 else world.rank
        return State(items=[TensorShard(name="s", tensor=torch.ones(1), global_shape=(3,), offset=(offset,))])  # type: ignore[arg-type]

    def document(world: World) -> State:
        return State(items=[], document={"seed": 1, "place": world.rank // 2})

    def not_json(world: World) -> State:
        return State(items=[], document={"model": torch.ones(1) if world.rank == 1 else 0})

    expected = {
        missing: "'w': replicated float32 [2] on rank 0, 2, missing on rank 1",
        other_dtype: "'w': replicated float32 [2] on rank 0, 1, replicated float64 [2] on rank 2",
        gap: "shards hold 3 elements, the tensor has 4",
        outside: "does not lie inside shape [3]",
        flat: "a box at [1] of shape [1, 2] does not lie inside shape [3, 2]",
        fraction: "offset and global_shape must be integers, not (1.0,) and (3,)",
        document: "'place' of rank 2 differs from rank 0's",
        not_json: "must be JSON",
    }
    for make_state, text in expected.items():
        assert text in fails_everywhere(3, tmp_path, make_state)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_usage_errors(tmp_path: Path) -> None:
    state = State(items=[])
    for options in ({"step": -1}, {"step": True}, {"step": 1, "keep": 0}, {"step": 1, "engine": "fast"}):
        with pytest.raises(UsageError):
            save(state, directory=tmp_path, comm=SerialWorld(), **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="choose one of auto, direct, mpio"):
        save(state, directory=tmp_path, step=1, comm=SerialWorld(), engine="fast")


def test_the_mpio_engine_without_mpi_ranks_is_refused_and_auto_says_why_not(tmp_path: Path) -> None:
    results = save_with(2, tmp_path)
    assert results[0].engine.value == "direct"
    assert results[0].note

    def rank_main(world: World) -> None:
        with pytest.raises(CheckpointError, match="engine mpio cannot be used"):
            save(state_of(world.rank, 2), directory=tmp_path, step=2, comm=world, engine="mpio")

    run_threads(2, rank_main, timeout_s=TIMEOUT_S)


def test_nothing_saved_is_none_and_an_explicit_path_must_exist(tmp_path: Path) -> None:
    assert load_newest_good(tmp_path / "never", comm=SerialWorld()) is None
    assert load_newest_good(tmp_path, comm=SerialWorld()) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        open_checkpoint(tmp_path, comm=SerialWorld())
    with pytest.raises(CheckpointError, match="cannot open"):
        open_checkpoint(tmp_path / "step-00000001.h5", comm=SerialWorld())


def test_sharded_names_are_really_sharded() -> None:
    shards = {
        item.name for rank in range(4) for item in state_of(rank, 4).items if isinstance(item, TensorShard)
    }
    assert shards == set(SHARDED)
