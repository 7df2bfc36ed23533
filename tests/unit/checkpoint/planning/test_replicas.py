"""Which parts of replicated tensors a save compares, and tensors of which rank 0's copy is saved."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from hpctrain.checkpoint import FromRank0, Replicated, State, load, model_items, save
from hpctrain.checkpoint.planning import replicas as module
from hpctrain.checkpoint.planning.replicas import (
    MAX_SAMPLED_BYTES,
    MAX_SAMPLED_TENSORS,
    SAMPLED_PART,
    Replicas,
)
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError
from tests.unit.checkpoint.states import same_bits

LARGE = 9 << 30


def replicas_of(sizes: list[int], *, step: int = 7) -> Replicas:
    tensors = [torch.empty(0).new_empty(1, dtype=torch.uint8).expand(size) for size in sizes]  # of no memory
    return Replicas.of([Replicated(name=f"t{i}", tensor=t) for i, t in enumerate(tensors)], step=step)


@given(
    st.lists(st.one_of(st.integers(0, 40_000), st.integers(0, 3 << 20)), max_size=20),
    st.integers(0, 10**18),
)
def test_a_number_of_samples_in_a_row_have_every_byte(sizes: list[int], step: int) -> None:
    replicas = replicas_of(sizes, step=step)
    seen: dict[int, set[tuple[int, int]]] = {number: set() for number in range(len(sizes))}
    for _ in range(replicas.turns * replicas.part):
        sample = replicas.sample(next(replicas.numbers))
        assert len({segment.source for segment in sample}) == len(sample)
        for segment in sample:
            seen[segment.source].add((segment.start, segment.start + segment.num_bytes))
    for number, size in enumerate(sizes):
        end = 0
        for start, stop in sorted(seen[number]):
            assert start == end
            end = stop
        assert end == size


def test_a_sample_is_bounded_in_bytes_and_in_tensors() -> None:
    small = replicas_of([4096] * 10_000)
    assert small.turns * MAX_SAMPLED_TENSORS >= 10_000
    assert all(len(small.sample(number)) <= MAX_SAMPLED_TENSORS for number in range(small.turns))
    usual = replicas_of([16 << 20] * 32)
    assert sum(segment.num_bytes for segment in usual.sample(3)) == (512 << 20) // SAMPLED_PART
    large = replicas_of([LARGE, 4096, 5])
    assert sum(segment.num_bytes for segment in large.sample(3)) <= MAX_SAMPLED_BYTES + 2 * 4096 + 16
    assert sum(segment.num_bytes for segment in large.whole()) == LARGE + 4096 + 5


MADE = {
    "contiguous": lambda: torch.zeros(64, 96),
    "transposed": lambda: torch.zeros(96, 64).t(),
    "strided": lambda: torch.zeros(40, 9, 7, 11)[::2, 1:3],
}


@pytest.mark.parametrize("layout", MADE)
def test_one_element_is_found_when_its_turn_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(module, "MIN_PIECE_BYTES", 16)

    def rank_main(world: ThreadsWorld) -> list[bool]:
        tensor = MADE[layout]()
        if world.rank == 1:
            tensor[1, 1] += 1
        found = []
        for step in range(SAMPLED_PART):
            items = [Replicated(name="w", tensor=tensor), Replicated(name="other", tensor=torch.ones(1000))]
            with suppress(CheckpointError):
                save(State(items=items), directory=tmp_path, step=step, comm=world, keep=1)
            found.append(world.rank == 0 and not (tmp_path / f"step-{step:08}.h5").exists())
            world.barrier()
        return found

    found, _ = run_threads(2, rank_main, timeout_s=300)
    assert 1 <= sum(found) <= 3  # its row lies in as many parts


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_of_each_ranks_own_tensors_rank_0s_are_saved(tmp_path: Path, num_ranks: int) -> None:
    """Large ones, which leave nothing of the replicated ones to rank 0; scalars, empty and strided ones."""
    weight = torch.randn(5000, generator=torch.Generator().manual_seed(1))

    def own(rank: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(rank)
        return {
            "large": torch.randn(300, 411, generator=made), "scalar": torch.tensor(rank),
            "empty": torch.empty(0, 3), "strided": torch.randn(31, 17, generator=made).t(),
        }  # fmt: skip

    def rank_main(world: ThreadsWorld) -> None:
        items = [FromRank0(name=name, tensor=tensor) for name, tensor in own(world.rank).items()]
        state = State(items=[*items, Replicated(name="weight", tensor=weight)])
        for files in (1, 2):
            path = save(state, directory=tmp_path / f"{files}", step=1, comm=world, files=files).path
            _, tensors = load(path, comm=world)
            for name, tensor in {**own(0), "weight": weight}.items():
                assert same_bits(tensors[name], tensor), name

    run_threads(num_ranks, rank_main, timeout_s=300)


def test_ranks_that_list_a_tensor_differently_are_reported(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> None:
        kind = FromRank0 if world.rank else Replicated
        with pytest.raises(
            CheckpointError, match=r"replicated float32 \[3\] on rank 0, rank 0's float32 \[3\] on rank 1"
        ):
            save(State(items=[kind(name="w", tensor=torch.ones(3))]), directory=tmp_path, step=1, comm=world)

    run_threads(2, rank_main, timeout_s=300)


def test_a_tensor_that_becomes_rank_0s_is_planned_anew(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> None:
        tensors = torch.full((4096,), 1.0), torch.full((4096,), 2.0 + world.rank)
        for step, kind in enumerate((Replicated, FromRank0)):
            items = [Replicated(name="a", tensor=tensors[0]), kind(name="b", tensor=tensors[1] * step)]
            path = save(State(items=items), directory=tmp_path, step=step, comm=world).path
        _, loaded = load(path, comm=world)
        assert same_bits(loaded["b"], torch.full((4096,), 2.0))

    run_threads(2, rank_main, timeout_s=300)


def test_the_items_of_a_model_are_its_state_dict() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3))
    model[2].weight = nn.Parameter(model[0].weight.detach().t())
    model.register_parameter("tied", model[0].weight)
    kinds = {item.name: type(item) for item in model_items(model, prefix="m/")}
    assert list(kinds) == [f"m/{name}" for name in model.state_dict()]
    assert {name for name, kind in kinds.items() if kind is FromRank0} == {
        "m/1.running_mean", "m/1.running_var", "m/1.num_batches_tracked",
    }  # fmt: skip


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    save(
        State(items=model_items(nn.BatchNorm1d(4))),
        directory=tmp_path,
        step=1,
        comm=SerialWorld(),
        replica_check="full",
    )
