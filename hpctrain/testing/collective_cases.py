"""The test cases that every communication backend must pass. `run_all` runs all of them in one launch of the ranks.

Each case is a function that every rank calls. The cases do not use pytest. A case checks its results only after all of
its communication, so that the ranks can continue with the next case even if the case fails.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from hpctrain.comm import (
    ReduceOp,
    World,
    all_gather_json,
    all_reduce_hierarchical,
    make_two_level,
)
from hpctrain.errors import (
    BufferMismatch,
    CommunicationError,
    TopologyError,
)
from hpctrain.testing import agreement_cases
from hpctrain.testing.agreement_cases import raised_by
from hpctrain.topology import Topology

# Values, buffer lengths and node layouts for the cases of a collective.


DTYPES = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
EPSILON = {torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LAYOUTS = {
    1: (["a"],),
    2: (["a", "a"], ["a", "b"]),
    3: (["a", "a", "a"], ["a", "b", "c"], ["a", "a", "b"], ["a", "b", "a"]),
    4: (
        ["a", "a", "b", "b"],
        ["a", "b", "a", "b"],
        ["a", "a", "a", "b"],
        ["a", "b", "b", "b"],
        ["a", "b", "b", "c"],
        ["a", "b", "b", "a"],  # the second rank of node a comes after the second of node b
    ),
}


def lengths(num_ranks: int) -> Sequence[int]:
    """Returns buffer lengths to test: 0, less than the number of ranks, not divisible by that number, and longer."""
    return (0, 1, max(1, num_ranks - 1), num_ranks, 2 * num_ranks + 1, 1000)


def values_of(rank: int, *, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of small integers that differ between ranks. Sums of these integers are exact in every dtype."""
    return ((torch.arange(length) * (rank + 1) + rank) % 7).to(dtype)


def random_of(rank: int, *, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, f"{found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(found, expected), f"{found.tolist()[:8]}, expected {expected.tolist()[:8]}"


# What every backend must do, as functions of one rank.


def case_rank_and_members_count_the_world(world: World) -> None:
    assert 0 <= world.rank < world.num_ranks
    assert world.members == tuple(range(world.num_ranks))
    assert all_gather_json(world, world.rank) == list(range(world.num_ranks))


def case_all_reduce_sums_whole_numbers_exactly(world: World) -> None:
    for dtype in DTYPES:
        for length in lengths(world.num_ranks):
            buffer = values_of(world.rank, length=length, dtype=dtype)
            world.all_reduce(buffer)
            parts = [values_of(r, length=length, dtype=dtype) for r in range(world.num_ranks)]
            expect_equal(buffer, sum(parts[1:], parts[0]))


def case_all_reduce_takes_the_maximum(world: World) -> None:
    for dtype in DTYPES:
        for length in lengths(world.num_ranks):
            buffer = values_of(world.rank, length=length, dtype=dtype)
            world.all_reduce(buffer, op=ReduceOp.MAX)
            parts = [values_of(r, length=length, dtype=dtype) for r in range(world.num_ranks)]
            expect_equal(buffer, torch.stack(parts).amax(0))


def case_a_sum_of_bytes_wraps(world: World) -> None:
    buffer = torch.full((5,), 200, dtype=torch.uint8)
    world.all_reduce(buffer)
    expect_equal(buffer, torch.full((5,), 200 * world.num_ranks % 256, dtype=torch.uint8))


def case_sums_of_random_numbers_stay_within_the_rounding_bound(world: World) -> None:
    for dtype, epsilon in EPSILON.items():
        buffer = random_of(world.rank, length=1001, dtype=dtype)
        world.all_reduce(buffer)
        parts = torch.stack([random_of(r, length=1001, dtype=dtype).double() for r in range(world.num_ranks)])
        # A sum of p terms in any order errs by at most (p - 1) epsilon times the sum of their sizes. The
        # reference has itself an error in float64: one more epsilon.
        bound = (world.num_ranks + 1) * epsilon * parts.abs().sum(0)
        error = (buffer.double() - parts.sum(0)).abs()
        assert bool((error <= bound).all()), f"{dtype}: {float((error - bound).max())} above the bound"


def case_half_precision_is_rounded_once_where_the_backend_promises_it(world: World) -> None:
    if world.backend == "horovod":
        return
    buffer = random_of(world.rank, length=1001, dtype=torch.float16)
    world.all_reduce(buffer)
    parts = [random_of(r, length=1001, dtype=torch.float16).float() for r in range(world.num_ranks)]
    expect_equal(buffer, sum(parts[1:], parts[0]).half())
    mine = world.reduce_scatter(
        random_of(world.rank, length=1001, dtype=torch.float16), counts=[1001] + [0] * (world.num_ranks - 1)
    )
    if world.rank == 0:
        expect_equal(mine, sum(parts[1:], parts[0]).half())
    # Partial sums leave the range of float16; the final sum does not.
    sign = 1.0 if world.rank % 2 == 0 else -1.0
    large = torch.full((3,), sign * 60000.0 / max(1, world.num_ranks // 2), dtype=torch.float16)
    world.all_reduce(large)
    assert bool(large.isfinite().all())


def case_every_rank_gets_the_same_bits_twice(world: World) -> None:
    for dtype in EPSILON:
        for length in (7, 4099, 100_003):
            results = []
            for _ in range(2):
                buffer = random_of(world.rank, length=length, dtype=dtype)
                world.all_reduce(buffer)
                results.append(buffer)
            expect_equal(results[0], results[1])
            gathered = world.all_gather_bytes(results[0].numpy().tobytes())
            assert len(set(gathered)) == 1, f"{dtype}, {length} elements: ranks differ"


def case_infinity_and_nan_survive_a_sum(world: World) -> None:
    for dtype in EPSILON:
        buffer = torch.zeros(3, dtype=dtype)
        if world.rank == world.num_ranks - 1:
            buffer[0], buffer[1] = float("inf"), float("nan")
        world.all_reduce(buffer)
        assert bool(buffer[0].isinf())
        assert bool(buffer[1].isnan())
        assert float(buffer[2]) == 0


def counts_to_try(num_ranks: int) -> Sequence[list[int]]:
    return (
        [3] * num_ranks,
        list(range(num_ranks)),
        list(range(num_ranks, 0, -1)),
        [11] + [0] * (num_ranks - 1),
        [0] * (num_ranks - 1) + [5],
        [0] * num_ranks,
        [1] * (num_ranks - 1) + [0],
        [400 + 37 * (r % 2) for r in range(num_ranks)],
    )


def case_reduce_scatter_gives_each_rank_its_slice(world: World) -> None:
    for dtype in DTYPES:
        for counts in counts_to_try(world.num_ranks):
            part = world.reduce_scatter(values_of(world.rank, length=sum(counts), dtype=dtype), counts=counts)
            parts = [values_of(r, length=sum(counts), dtype=dtype) for r in range(world.num_ranks)]
            begin = sum(counts[: world.rank])
            expect_equal(part, sum(parts[1:], parts[0])[begin : begin + counts[world.rank]])


def case_all_gather_puts_unequal_parts_in_rank_order(world: World) -> None:
    for dtype in DTYPES:
        for counts in counts_to_try(world.num_ranks):
            part = values_of(world.rank, length=counts[world.rank], dtype=dtype)
            whole = world.all_gather(part, counts=counts)
            expect_equal(
                whole, torch.cat([values_of(r, length=n, dtype=dtype) for r, n in enumerate(counts)])
            )
            expect_equal(part, values_of(world.rank, length=counts[world.rank], dtype=dtype))


def case_all_gather_fills_a_tensor_that_is_given_which_may_hold_the_own_part(world: World) -> None:
    for counts in (*counts_to_try(world.num_ranks), [40_000] * world.num_ranks):
        wanted = torch.cat([values_of(r, length=n, dtype=torch.float32) for r, n in enumerate(counts)])
        part = values_of(world.rank, length=counts[world.rank], dtype=torch.float32)
        apart = torch.full((sum(counts),), -1.0)
        assert world.all_gather(part, counts=counts, out=apart).data_ptr() == apart.data_ptr()
        expect_equal(apart, wanted)
        around = torch.full((sum(counts),), -1.0)
        own = around.split(list(counts))[world.rank].copy_(part)
        world.all_gather(own, counts=counts, out=around)
        expect_equal(around, wanted)


def exchanges_to_try(num_ranks: int) -> Sequence[list[list[int]]]:
    """Returns matrices of counts to test. Row a, column b is the number of elements that rank a sends to rank b."""
    ranks = range(num_ranks)
    return (
        [[3] * num_ranks for _ in ranks],
        [[(2 * a + 3 * b) % 5 for b in ranks] for a in ranks],
        [[0] * num_ranks for _ in ranks],
        [[7 * (b == 0) for b in ranks] for _ in ranks],  # all to rank 0
        [[5 * (a == num_ranks - 1) for _ in ranks] for a in ranks],  # all from the last
        [[400 + 37 * (a + b) for b in ranks] for a in ranks],
    )


def case_all_to_all_brings_each_rank_its_slices_in_rank_order(world: World) -> None:
    for dtype in DTYPES:
        for table in exchanges_to_try(world.num_ranks):
            sent = [values_of(a, length=sum(row), dtype=dtype) for a, row in enumerate(table)]
            mine = sent[world.rank].clone()
            found = world.all_to_all(
                mine, send_counts=table[world.rank], receive_counts=[row[world.rank] for row in table]
            )
            slices = [whole.split(row)[world.rank] for whole, row in zip(sent, table, strict=True)]
            expect_equal(found, torch.cat(slices))
            expect_equal(mine, sent[world.rank])


def case_counts_of_an_all_to_all_that_do_not_fit_are_refused(world: World) -> None:
    n = world.num_ranks
    for length, send, receive in (
        (n + 1, [1] * n, [1] * n),
        (n, [1] * n, [1] * (n + 1)),
        (n, [1] * n, [2] * n),
    ):
        error = raised_by(
            partial(world.all_to_all, torch.zeros(length), send_counts=send, receive_counts=receive)
        )
        assert isinstance(error, BufferMismatch)
        assert f"all_to_all on rank {world.rank}" in str(error)
    world.barrier()


def case_broadcast_from_every_root(world: World) -> None:
    for root in range(world.num_ranks):
        for dtype in DTYPES:
            for length in (0, 1, 1000):
                buffer = values_of(world.rank, length=length, dtype=dtype)
                world.broadcast(buffer, root=root)
                expect_equal(buffer, values_of(root, length=length, dtype=dtype))


def case_bytes_of_any_length_arrive(world: World) -> None:
    for data in ([b""] * 8, [b"", b"x" * 3, b"\0\xff", b""], [b"z" * 70_000, b"", b"1", b"22"]):
        found = world.all_gather_bytes(data[world.rank])
        assert found == data[: world.num_ranks]


def case_a_buffer_that_is_not_flat_is_refused_before_anything_is_sent(world: World) -> None:
    for wrong in (torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(3, dtype=torch.complex64)):
        error = raised_by(partial(world.all_reduce, wrong))
        assert isinstance(error, BufferMismatch)
        assert f"rank {world.rank}" in str(error)
    assert isinstance(
        raised_by(lambda: world.reduce_scatter(torch.zeros(3), counts=[1] * (world.num_ranks + 1))),
        BufferMismatch,
    )
    assert isinstance(
        raised_by(lambda: world.all_gather(torch.zeros(3), counts=[2] * world.num_ranks)), BufferMismatch
    )
    counts = [2] * world.num_ranks
    for wrong in (torch.zeros(sum(counts) + 1), torch.zeros(sum(counts), dtype=torch.float64)):
        assert isinstance(
            raised_by(partial(world.all_gather, torch.zeros(2), counts=counts, out=wrong)), BufferMismatch
        )
    assert isinstance(
        raised_by(lambda: world.broadcast(torch.zeros(1), root=world.num_ranks)), BufferMismatch
    )
    world.barrier()


def case_bfloat16_is_summed_in_float32_or_refused(world: World) -> None:
    buffer = random_of(world.rank, length=101, dtype=torch.bfloat16)
    if world.backend == "horovod" and world.num_ranks > 1:
        error = raised_by(lambda: world.all_reduce(buffer))
        assert isinstance(error, CommunicationError)
        assert "bfloat16" in str(error)
        return
    world.all_reduce(buffer)
    parts = [random_of(r, length=101, dtype=torch.bfloat16).float() for r in range(world.num_ranks)]
    expect_equal(buffer, sum(parts[1:], parts[0]).bfloat16())


def case_a_gradient_that_requires_grad_can_be_sent(world: World) -> None:
    buffer = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        world.all_reduce(buffer)
    assert buffer.tolist() == [world.num_ranks] * 4


def case_split_makes_groups_in_the_order_asked(world: World) -> None:
    last = world.num_ranks - 1
    groups_to_try = [[[r] for r in range(world.num_ranks)], [list(range(world.num_ranks))], [[last]], []]
    if world.num_ranks > 1:
        groups_to_try += [[[last, 0]], [list(reversed(range(world.num_ranks)))]]
    if world.num_ranks == 4:
        groups_to_try += [[[3, 0], [1, 2]], [[2, 0, 3]], [[0, 2], [1, 3]]]
    for groups in groups_to_try:
        group = world.split(groups)
        mine = next((g for g in groups if world.rank in g), None)
        assert (group is None) == (mine is None), f"{groups}: {group}"
        if group is None or mine is None:
            continue
        assert group.members == tuple(mine)
        assert group.members[group.rank] == world.rank
        assert group.num_ranks == len(mine)
        assert group.backend == world.backend
        assert group.all_gather_bytes(bytes([world.rank])) == [bytes([r]) for r in mine]
        buffer = torch.tensor([1.0 + world.rank])
        group.all_reduce(buffer)
        assert float(buffer) == len(mine) + sum(mine)
        counts = list(range(1, len(mine) + 1))
        part = group.reduce_scatter(torch.arange(float(sum(counts))), counts=counts)
        begin = sum(counts[: group.rank])
        expect_equal(part, len(mine) * torch.arange(float(sum(counts)))[begin : begin + len(part)])
        whole = group.all_gather(torch.full((group.rank + 1,), world.rank), counts=counts)
        expect_equal(whole, torch.cat([torch.full((n,), r) for n, r in zip(counts, mine, strict=True)]))
        sent = torch.tensor([100 * world.rank + r for r in mine for _ in range(2)])
        found = group.all_to_all(sent, send_counts=[2] * len(mine), receive_counts=[2] * len(mine))
        assert found.tolist() == [100 * r + world.rank for r in mine for _ in range(2)]
        buffer = torch.tensor([world.rank])
        group.broadcast(buffer, root=len(mine) - 1)
        assert int(buffer) == mine[-1]
        group.barrier()


def case_split_refuses_groups_that_overlap(world: World) -> None:
    overlapping: tuple[list[list[int]], ...] = ([[0], [0]], [[world.num_ranks]], [[]])
    for groups in overlapping:
        assert isinstance(raised_by(partial(world.split, groups)), BufferMismatch)


def case_a_duplicate_serves_another_thread_at_the_same_time(world: World) -> None:
    duplicate = world.duplicate()
    assert duplicate.members == world.members
    wrong: list[str] = []

    def in_the_background() -> None:
        try:
            for index in range(60):
                buffer = torch.full((300,), float(index))
                duplicate.all_reduce(buffer)
                if not bool((buffer == index * world.num_ranks).all()):
                    wrong.append(f"background {index}: {float(buffer[0])}")
        except Exception:
            wrong.append(traceback.format_exc())

    thread = threading.Thread(target=in_the_background)
    thread.start()
    for index in range(60):
        buffer = torch.full((500,), float(2 * index))
        world.all_reduce(buffer)
        if not bool((buffer == 2 * index * world.num_ranks).all()):
            wrong.append(f"foreground {index}: {float(buffer[0])}")
        if index % 10 == 0:
            world.barrier()
    thread.join()
    assert not wrong, wrong


def case_hierarchical_equals_flat_on_every_layout(world: World) -> None:
    for names in LAYOUTS[world.num_ranks]:
        levels = make_two_level(world, Topology.from_node_names(names))
        for dtype in DTYPES:
            for length in lengths(world.num_ranks):
                buffer = values_of(world.rank, length=length, dtype=dtype)
                levels.all_reduce(buffer)
                parts = [values_of(r, length=length, dtype=dtype) for r in range(world.num_ranks)]
                expect_equal(buffer, sum(parts[1:], parts[0]))
        for dtype, epsilon in EPSILON.items():
            buffer = random_of(world.rank, length=1001, dtype=dtype)
            all_reduce_hierarchical(
                buffer, local=levels.local, cross=levels.cross, num_slices=levels.num_slices
            )
            parts = [random_of(r, length=1001, dtype=dtype).double() for r in range(world.num_ranks)]
            bound = (world.num_ranks + 2) * epsilon * sum(part.abs() for part in parts)
            error = (buffer.double() - sum(parts)).abs()
            gathered = world.all_gather_bytes(buffer.numpy().tobytes())
            assert bool((error <= bound).all()), f"{names} {dtype}: {float((error - bound).max())} too much"
            assert len(set(gathered)) == 1, f"{names} {dtype}: ranks differ"


def case_two_levels_need_a_topology_of_all_ranks(world: World) -> None:
    topology = Topology.from_node_names(["a"] * (world.num_ranks + 1))
    error = raised_by(lambda: make_two_level(world, topology))
    assert isinstance(error, TopologyError)


def case_remote_memory_is_written_and_counted_without_its_owner(world: World) -> None:
    num_ranks, additions = world.num_ranks, 50
    memory = world.remote_memory(128)
    if memory is None:  # the backend has none
        return
    memory.local[:] = 0
    memory.publish()
    following = (world.rank + 1) % num_ranks
    memory.put(following, offset=64, data=np.full(9, world.rank + 1, dtype=np.uint8))
    memory.complete()
    memory.store(following, offset=16, value=2**40 + world.rank)
    memory.complete()
    before = [memory.fetch_add(0, offset=0, value=1) for _ in range(additions)]
    world.barrier()
    memory.sync()
    previous = (world.rank - 1) % num_ranks
    arrived, word = memory.local[64:74].tolist(), int(memory.local[16:24].view(np.int64)[0])
    read = np.zeros(9, dtype=np.uint8)
    memory.get(following, offset=64, out=read)
    memory.flush()
    total = memory.fetch_add(0, offset=0, value=0)
    numbers = all_gather_json(world, before)
    world.barrier()
    memory.close()
    assert arrived == [previous + 1] * 9 + [0]
    assert word == 2**40 + previous
    assert read.tolist() == [world.rank + 1] * 9
    assert total == num_ranks * additions
    assert sorted(number for of_rank in numbers for number in of_rank) == list(range(num_ranks * additions))


def all_cases() -> dict[str, Callable[[World], None]]:
    return {
        name.removeprefix("case_"): function
        for name, function in {**globals(), **vars(agreement_cases)}.items()
        if name[:5] == "case_"
    }


def run_all(world: World) -> dict[str, str | None]:
    """Runs every case on this rank. Returns, for each case by name, None, or the traceback if the case has failed."""
    found: dict[str, str | None] = {}
    for name, function in all_cases().items():
        try:
            function(world)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
            if world.backend == "threads":
                raise  # the other threads cannot continue without this one
    return found
