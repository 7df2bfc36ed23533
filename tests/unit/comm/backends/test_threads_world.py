"""Ranks as threads: properties over sizes and layouts, and how one rank's end reaches the others."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given, strategies as st

from hpctrain.comm import World, make_two_level, raise_together
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import BufferMismatch, CommunicationError, DataError, DivergedError
from hpctrain.topology import Topology

layouts = st.lists(st.sampled_from("abc"), min_size=1, max_size=6)


@given(names=layouts, length=st.integers(0, 40), seed=st.integers(0, 2**16))
def test_two_levels_sum_whole_numbers_exactly_on_any_layout(names: list[str], length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(-9, 9, (len(names), length), generator=generator).float()

    def rank(world: World) -> torch.Tensor:
        levels = make_two_level(world, Topology.from_node_names(names))
        buffer = parts[world.rank].clone()
        levels.all_reduce(buffer)
        return buffer

    for result in run_threads(len(names), rank):
        assert torch.equal(result, parts.sum(0))


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_reduce_scatter_then_all_gather_is_all_reduce(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn((len(counts), sum(counts)), generator=generator)

    def rank(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        reduced = parts[world.rank].clone()
        world.all_reduce(reduced)
        part = world.reduce_scatter(parts[world.rank].clone(), counts=counts)
        return reduced, world.all_gather(part, counts=counts)

    results = run_threads(len(counts), rank)
    for reduced, gathered in results:
        assert torch.equal(reduced, gathered)
        assert torch.equal(reduced, results[0][0])


@given(data=st.lists(st.binary(max_size=20), min_size=1, max_size=5))
def test_bytes_come_back_as_they_were_sent(data: list[bytes]) -> None:
    for found in run_threads(len(data), lambda world: world.all_gather_bytes(data[world.rank])):
        assert found == data


@given(order=st.permutations(range(4)), size=st.integers(1, 4))
def test_a_group_keeps_the_order_it_was_asked_for(order: list[int], size: int) -> None:
    members = order[:size]

    def rank(world: World) -> list[bytes] | None:
        group = world.split([members])
        return None if group is None else group.all_gather_bytes(bytes([world.rank]))

    found = run_threads(4, rank)
    for rank_number in range(4):
        expected = [bytes([m]) for m in members] if rank_number in members else None
        assert found[rank_number] == expected


def test_an_exception_on_one_rank_ends_the_others_and_reaches_the_caller() -> None:
    def rank(world: World) -> None:
        group = world.split([[0, 1], [2]])
        if world.rank == 2:
            raise ZeroDivisionError("in the middle")
        assert group is not None
        group.barrier()
        world.barrier()

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        run_threads(3, rank, timeout_s=300)
    assert time.monotonic() - started < 150  # and not by the limit


def test_different_buffers_raise_on_every_rank() -> None:
    seen: list[int] = []

    def rank(world: World) -> None:
        try:
            world.all_reduce(torch.zeros(2 + world.rank))
        except BufferMismatch:
            seen.append(world.rank)
            raise

    with pytest.raises(BufferMismatch, match=r"rank 0 2 x torch\.float32, rank 1 3 x"):
        run_threads(2, rank)
    assert sorted(seen) == [0, 1]


def test_different_operations_raise_on_every_rank() -> None:
    def rank(world: World) -> None:
        if world.rank == 0:
            world.barrier()
        else:
            world.all_gather_bytes(b"")

    with pytest.raises(BufferMismatch, match="rank 0 barrier, rank 1 all_gather_bytes"):
        run_threads(2, rank)


def test_ranks_go_on_after_an_agreed_error() -> None:
    def rank(world: World) -> list[bytes]:
        with pytest.raises(DataError):
            raise_together(world, DataError("one") if world.rank else None)
        with pytest.raises(BufferMismatch):
            world.all_reduce(torch.zeros(world.rank))
        return world.all_gather_bytes(b"on")

    assert run_threads(2, rank) == [[b"on", b"on"]] * 2


def test_abort_becomes_the_error_of_its_exit_code() -> None:
    def rank(world: World) -> None:
        if world.rank == 1:
            world.abort(7)
        world.barrier()

    with pytest.raises(DivergedError, match="rank 1 ended the run with exit code 7"):
        run_threads(3, rank)


@pytest.mark.timing
def test_a_late_rank_is_named_with_its_stack() -> None:
    done = threading.Event()

    def rank(world: World) -> None:
        if world.rank == 1:
            done.wait(300)

    with pytest.raises(CommunicationError, match=r"ranks \[1\] have not ended after 2 s[\s\S]*done.wait"):
        run_threads(2, rank, timeout_s=2)
    done.set()


def test_half_precision_sum_does_not_depend_on_who_asks() -> None:
    parts = torch.randn((4, 64), generator=torch.Generator().manual_seed(1)).half()
    for order in itertools.permutations(range(4)):

        def rank(world: World, order: tuple[int, ...] = order) -> torch.Tensor:
            group = world.split([order])
            assert group is not None
            buffer = parts[group.rank].clone()
            group.all_reduce(buffer)
            return buffer

        results = run_threads(4, rank)
        assert all(torch.equal(result, results[0]) for result in results)
