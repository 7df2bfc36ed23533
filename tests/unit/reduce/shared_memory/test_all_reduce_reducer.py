"""Our own reductions, with ranks as threads: right to a stated bound on every layout, size and wire."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import BufferMismatch
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.shared_memory.shared_buckets import ElemRange, TwoLevelPlace, chunks_of, cut
from hpctrain.topology import Topology
from tests.unit.reduce.shared_memory.transport_cases import (
    CPU,
    LAYOUTS,
    OURS,
    ROUNDING,
    bound,
    engine,
    sum_all,
    topology_of,
    values_of,
)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    algorithm=st.sampled_from(OURS),
    wire=st.sampled_from(sorted(ROUNDING)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 5, 63, 64, 65, 257, 1031]), min_size=1, max_size=4),
    chunk_elems=st.sampled_from([1, 7, 64, 100_000]),
    seed=st.integers(0, 100),
)
def test_sums_are_within_the_bound_and_the_same_bits_on_every_rank(
    layout: tuple[int, ...], algorithm: Algorithm, wire: str, dtype: torch.dtype, sizes: list[int],
    chunk_elems: int, seed: int,
) -> None:  # fmt: skip
    topology = topology_of(layout)
    if chunk_elems == 1:
        sizes = [min(size, 65) for size in sizes]

    def rank_main(world: ThreadsWorld) -> list[list[torch.Tensor]]:
        reducer = engine(world, topology, algorithm=algorithm, wire=wire, chunk_elems=chunk_elems)
        buffers = reducer.plan([Bucket(dtype, (), size) for size in sizes], device=CPU)
        rounds = []
        for _ in range(2):
            for number, buffer in enumerate(buffers):
                buffer.copy_(values_of(world.rank, buffer.numel(), dtype=dtype, seed=seed + number))
            sum_all(reducer, len(sizes))
            rounds.append([buffer.clone() for buffer in buffers])
        reducer.close()
        return rounds

    results = run_threads(topology.num_ranks, rank_main)
    two_levels = algorithm in (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING)
    num_nodes = topology.num_nodes if two_levels else topology.num_ranks
    for number, size in enumerate(sizes):
        values = [values_of(r, size, dtype=dtype, seed=seed + number) for r in range(topology.num_ranks)]
        exact = torch.stack([v.double() for v in values]).sum(0)
        error = float((results[0][0][number].double() - exact).abs().max()) if size else 0.0
        assert error <= bound(values, wire=wire, algorithm=algorithm, num_nodes=num_nodes)
        for first, second in results:
            assert torch.equal(first[number], results[0][0][number])  # every rank
            assert torch.equal(second[number], first[number])  # every time


# Not the rings: they add in the order in which a slice goes round.
@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.HIERARCHICAL])
def test_an_elements_bits_do_not_depend_on_its_bucket(algorithm: Algorithm) -> None:
    topology = topology_of((2, 1, 1))

    def rank_main(world: ThreadsWorld) -> list[torch.Tensor]:
        whole = values_of(world.rank, 1000, dtype=torch.float32)
        found = []
        for sizes, chunk_elems in (([1000], 64), ([1, 499, 500], 37)):
            reducer = engine(world, topology, algorithm=algorithm, chunk_elems=chunk_elems)
            buffers = reducer.plan([Bucket(torch.float32, (), size) for size in sizes], device=CPU)
            for buffer, values in zip(buffers, whole.split(sizes), strict=True):
                buffer.copy_(values)
            sum_all(reducer, len(sizes))
            found.append(torch.cat([buffer.clone() for buffer in buffers]))
            reducer.close()
        return found

    one, many = run_threads(4, rank_main)[0]
    assert torch.equal(one, many)


@pytest.mark.parametrize("algorithm", OURS)
def test_bytes_that_leave_a_node_are_the_bound(algorithm: Algorithm) -> None:
    topology = Topology.from_node_names(["a", "a", "b", "b", "c", "c", "d", "d"])  # neighbours share a node
    numel = 8 * 4 * 1000

    def rank_main(world: ThreadsWorld) -> int:
        reducer = engine(world, topology, algorithm=algorithm, wire="fp16", chunk_elems=4000)
        reducer.plan([Bucket(torch.float32, (), numel)], device=CPU)
        sum_all(reducer, 1)
        sent = reducer.bytes_sent()
        reducer.close()
        return sent

    sent = run_threads(8, rank_main)
    of_a_node = sent[0] + sent[1]
    expected = {
        Algorithm.HIERARCHICAL: 2 * 3 / 4 * 2 * numel,
        Algorithm.HIERARCHICAL_RING: 2 * 3 / 4 * 2 * numel,
        Algorithm.RING: 2 * 7 / 8 * 2 * numel,  # one of the two ranks has its successor elsewhere
        Algorithm.DIRECT: 2 * 2 * 6 / 8 * 2 * numel,  # each of two ranks sends to the six that are elsewhere
    }
    assert of_a_node == expected[algorithm]


@pytest.mark.parametrize("algorithm", OURS)
def test_gradients_that_are_not_finite_are_not_finite_on_every_rank(algorithm: Algorithm) -> None:
    def rank_main(world: ThreadsWorld) -> bool:
        finite = False
        for wire in ROUNDING:
            reducer = engine(world, topology_of((2, 1)), algorithm=algorithm, wire=wire, feedback=True)
            (buffer,) = reducer.plan([Bucket(torch.float32, (), 500)], device=CPU)
            buffer[123] = torch.inf if world.rank == 1 else 1.0
            sum_all(reducer, 1)
            finite |= bool(buffer.isfinite().all())
            reducer.close()
        return finite

    assert run_threads(3, rank_main) == [False] * 3


def test_a_rank_that_plans_other_buckets_is_named_on_every_rank() -> None:
    def rank_main(world: ThreadsWorld) -> str:
        reducer = engine(world, topology_of((2, 2)), algorithm=Algorithm.HIERARCHICAL)
        numel = 99 if world.rank == 2 else 100
        with pytest.raises(BufferMismatch) as caught:
            reducer.plan([Bucket(torch.float32, (), numel)], device=CPU)
        return str(caught.value)

    for text in run_threads(4, rank_main):
        assert "rank 2" in text
        assert "99 x float32" in text


# ---------------------------------------------------------------------- the plan


@given(begin=st.integers(0, 50), numel=st.integers(0, 200), num_parts=st.integers(1, 20))
def test_parts_are_a_span_cut_in_order(begin: int, numel: int, num_parts: int) -> None:
    parts = cut(ElemRange(begin, begin + numel), num_parts=num_parts)
    assert len(parts) == num_parts
    assert [i for part in parts for i in range(part.begin, part.end)] == list(range(begin, begin + numel))
    assert max(p.numel for p in parts) - min(p.numel for p in parts) <= 1


@given(numel=st.integers(0, 2**40), chunk_elems=st.integers(2**30, 2**33))
def test_chunks_cover_more_than_two_to_the_31_elements(numel: int, chunk_elems: int) -> None:
    chunks = chunks_of(numel, chunk_elems=chunk_elems)
    assert sum(chunk.numel for chunk in chunks) == numel
    assert all(0 < chunk.numel <= chunk_elems for chunk in chunks)
    assert all(a.end == b.begin for a, b in pairwise(chunks))


def test_a_rank_beyond_the_smallest_node_carries_nothing() -> None:
    topology = Topology.from_node_names(["a", "a", "a", "b"])
    assert TwoLevelPlace.of(topology, rank=0).column == (0, 3)
    assert TwoLevelPlace.of(topology, rank=2).column == ()
    assert TwoLevelPlace.of(topology, rank=2).locals == (0, 1, 2)
