"""What a reduction within one node does on its way: squares for the norm, and sums of a few numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.comm import Collective
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import BufferMismatch
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, Numbers, Reduced, result_of
from hpctrain.reduce.contract.step_end import ROW_ELEMS
from hpctrain.reduce.shared_memory.all_reduce_reducer import AllReduceReducer
from hpctrain.reduce.shared_memory.shared_buckets import MAX_NUMBERS
from hpctrain.reduce.shared_memory.summation import PIECE_ELEMS
from tests.unit.reduce.shared_memory.transport_cases import CPU, engine, sum_all, topology_of, values_of

SIZES = [1, 2, 5, ROW_ELEMS - 1, ROW_ELEMS, 3 * ROW_ELEMS + 17, PIECE_ELEMS + 1, 4 * PIECE_ELEMS + ROW_ELEMS]


def within(world: ThreadsWorld, *ranks_per_node: int, keep_squares: bool = True) -> AllReduceReducer:
    reducer = engine(world, topology_of(ranks_per_node), algorithm=Algorithm.HIERARCHICAL)
    if keep_squares:
        reducer.keep_squares()
    return reducer


def summed(
    reducer: BucketReducer,
    count: int,
    numbers: Numbers | None = None,
    *,
    comm: Collective,
    before: bool = False,
) -> Reduced:
    """The end of a step of `count` buckets, asked for before its first reduction begins or after its last has ended."""
    numbers = np.empty(0) if numbers is None else numbers
    finishing = reducer.finish(numbers, comm=comm) if before else None
    sum_all(reducer, count)
    return result_of(finishing or reducer.finish(numbers, comm=comm))


@settings(max_examples=30, deadline=None)
@given(
    num_ranks=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    bucket_bytes=st.sampled_from([1, 4_000_000]),
)
def test_every_rank_knows_the_square_of_the_summed_gradients(
    num_ranks: int, dtype: torch.dtype, sizes: list[int], bucket_bytes: int
) -> None:
    buckets = plan_buckets([GradientSpec(size, dtype) for size in sizes], bucket_bytes=bucket_bytes)

    def rank_main(world: ThreadsWorld) -> tuple[list[float], list[torch.Tensor]]:
        reducer = within(world, num_ranks)
        buffers = reducer.plan(buckets, device=CPU)
        squares = []
        for scale in (1.0, 3.0):
            reducer.begin_step(1.0)
            for number, (bucket, buffer) in enumerate(zip(buckets, buffers, strict=True)):
                values = values_of(world.rank, bucket.num_gradients, dtype=dtype, seed=number)
                buffer[: bucket.num_gradients] = scale * values
                buffer[bucket.first_flag :] = 1e6  # must not count
            squares.append(summed(reducer, len(buckets), comm=world).norm_square)
        sums = [buffer.clone() for buffer in buffers]
        reducer.close()
        return squares, sums

    results = run_threads(num_ranks, rank_main)
    gradients = [sums[: b.num_gradients].double() for b, sums in zip(buckets, results[0][1], strict=True)]
    exact = sum(float(values.square().sum()) for values in gradients)
    first, last = results[0][0]
    assert all(squares == [first, last] for squares, _ in results)
    assert last == pytest.approx(exact, rel=1e-9)
    assert last == pytest.approx(9 * first, rel=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sums_are_multiplied_until_the_next_plan(num_ranks: int) -> None:
    buckets = plan_buckets(
        [GradientSpec(size, torch.float32) for size in (PIECE_ELEMS + 7, 100)], bucket_bytes=1
    )

    def rank_main(world: ThreadsWorld) -> None:
        reducer = within(world, num_ranks)
        for factors in ((0.25, 0.5, 1.0), (None,)):
            buffers = reducer.plan(buckets, device=CPU)
            for factor in factors:
                for bucket, buffer in zip(buckets, buffers, strict=True):
                    buffer[: bucket.num_gradients] = 4.0
                    buffer[bucket.first_flag :] = 1.0
                assert factor is None or reducer.begin_step(factor) == factor
                square = summed(reducer, len(buckets), comm=world).norm_square
                expected = 4.0 * num_ranks * (factor or 1.0)
                for bucket, buffer in zip(buckets, buffers, strict=True):
                    assert buffer[: bucket.num_gradients].eq(expected).all()
                    assert buffer[bucket.first_flag :].ne(0).all()
                assert square == expected**2 * sum(bucket.num_gradients for bucket in buckets)
        reducer.close()

    run_threads(num_ranks, rank_main)


def test_sums_between_nodes_are_not_multiplied() -> None:
    def rank_main(world: ThreadsWorld) -> None:
        reducer = within(world, 1, 1)
        (buffer,) = reducer.plan([Bucket(torch.float32, (), 100)], device=CPU)
        assert reducer.begin_step(0.5) == 1.0
        buffer.fill_(1.0)
        sum_all(reducer, 1)
        assert buffer.eq(2.0).all()
        reducer.close()

    run_threads(2, rank_main)


def test_squares_that_are_not_finite_say_so() -> None:
    def rank_main(world: ThreadsWorld, *, value: float, dtype: torch.dtype) -> float:
        reducer = within(world, 2)
        (bucket,) = plan_buckets([GradientSpec(3000, dtype)], bucket_bytes=1)
        (buffer,) = reducer.plan([bucket], device=CPU)
        if world.rank == 0:
            buffer[2999] = value
        square = summed(reducer, 1, comm=world).norm_square
        reducer.close()
        return square

    for value, dtype in ((math.inf, torch.float32), (math.nan, torch.float32), (1e200, torch.float64)):
        found = run_threads(2, partial(rank_main, value=value, dtype=dtype))
        assert not any(map(math.isfinite, found))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 4_000_000])
def test_numbers_are_summed_in_the_order_of_the_ranks(num_ranks: int, bucket_bytes: int) -> None:
    """Many rounds at uneven speeds: a rank that is ahead must not overwrite what another still reads.

    In most rounds the reductions carry the numbers; those that are summed by themselves take the same memory.
    """
    buckets = plan_buckets(
        [GradientSpec(size, torch.float32) for size in (7, 3000, 1)], bucket_bytes=bucket_bytes
    )

    def rank_main(world: ThreadsWorld) -> list[list[float]]:
        reducer = within(world, num_ranks)
        reducer.plan(buckets, device=CPU)
        sums = []
        for number in range(200):
            reducer.begin_step(1.0)
            numbers = np.array([0.1 * (world.rank + 1), number, 1e16 * (-1) ** world.rank])
            if (number + world.rank) % 7 == 0:
                time.sleep(0.001)
            reduced = summed(reducer, len(buckets), numbers, comm=world, before=number % 10 != 9)
            sums.append(reduced.numbers.tolist())
        reducer.close()
        return sums

    results = run_threads(num_ranks, rank_main)
    for number, found in enumerate(results[0]):
        expected = [0.0, 0.0, 0.0]
        for rank in range(num_ranks):
            expected = [
                a + b for a, b in zip(expected, [0.1 * (rank + 1), number, 1e16 * (-1) ** rank], strict=True)
            ]
        assert found == expected
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_with_another_count_of_numbers_is_reported_on_every_rank(before: bool) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        reducer = within(world, 3)
        reducer.plan([Bucket(torch.float32, (), 10)], device=CPU)
        with pytest.raises(BufferMismatch) as caught:
            summed(reducer, 1, np.zeros(3 if world.rank == 1 else 2), comm=world, before=before)
        assert caught.value.agreed
        return str(caught.value)

    for reported in run_threads(3, rank_main):
        assert "rank 0: 2, rank 1: 3, rank 2: 2" in reported


MAKERS: dict[str, Callable[[ThreadsWorld], BucketReducer]] = {
    "one node": lambda world: within(world, 4),
    "one node without squares": lambda world: within(world, 4, keep_squares=False),
    "two nodes": lambda world: within(world, 3, 1),
    "flat": lambda world: CollectiveReducer.flat(world.duplicate(), topology=topology_of((4,))),
}


@pytest.mark.parametrize("count", [1, 3, MAX_NUMBERS + 1])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_step_ends_with_the_norm_and_the_sums_of_the_numbers(
    make: Callable[[ThreadsWorld], BucketReducer], before: bool, count: int
) -> None:
    """Asked for before the first reduction of a step begins, or after the last has ended; several steps."""
    buckets = plan_buckets([GradientSpec(size, torch.float32) for size in (7, 3000, 1)], bucket_bytes=1)

    def rank_main(world: ThreadsWorld) -> list[tuple[float, list[float], float]]:
        reducer, comm = make(world), world.duplicate()
        buffers = reducer.plan(buckets, device=CPU)
        found = []
        for step in range(3):
            assert reducer.begin_step(0.5) in (0.5, 1.0)
            for number, (bucket, buffer) in enumerate(zip(buckets, buffers, strict=True)):
                buffer[: bucket.num_gradients] = values_of(
                    world.rank, bucket.num_gradients, dtype=torch.float32, seed=number + step
                )
                buffer[bucket.first_flag :] = 1e6  # must not count
            numbers = np.arange(count) + 10.0 * world.rank + step
            reduced = summed(reducer, len(buckets), numbers, comm=comm, before=before)
            exact = sum(
                float(buffer[: bucket.num_gradients].double().square().sum())
                for bucket, buffer in zip(buckets, buffers, strict=True)
            )
            found.append((reduced.norm_square, reduced.numbers.tolist(), exact))
        reducer.close()
        return found

    results = run_threads(4, rank_main)
    assert all(result == results[0] for result in results)
    for step, (square, numbers, exact) in enumerate(results[0]):
        assert square == pytest.approx(exact, rel=1e-6)
        assert numbers == [4.0 * (index + step) + 60.0 for index in range(count)]
