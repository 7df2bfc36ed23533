"""Our own reductions, with ranks as threads: right to a stated bound on every layout, size and wire."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import BufferMismatch, CheckpointError
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.codecs.registry import codec_named
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, StateTensor
from hpctrain.reduce.shared_memory.engine_reducer import EngineReducer
from hpctrain.reduce.shared_memory.partition import ElemRange, TwoLevelPlace, chunks_of, cut, one_rank_nodes
from hpctrain.topology import Topology

CPU = torch.device("cpu")
OURS = [Algorithm.RING, Algorithm.DIRECT, Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING]
# Relative error of one encoding, against the largest value that shares a scale: for int8 that is the block's.
ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}
LAYOUTS = [
    (1,),
    (2,),
    (1, 1),
    (3,),
    (2, 1),
    (1, 1, 1),
    (4,),
    (2, 2),
    (3, 1),
    (1, 2, 1),
    (1, 1, 1, 1),
    (2, 3),
    (3, 2, 2),
]


def topology_of(ranks_per_node: tuple[int, ...]) -> Topology:
    """Round robin, so that a node's ranks are not neighbours."""
    left = list(ranks_per_node)
    names: list[str] = []
    while any(left):
        for node, count in enumerate(left):
            if count:
                names.append(f"node{node}")
                left[node] -= 1
    return Topology.from_node_names(names)


def engine(
    world: ThreadsWorld, topology: Topology, *, algorithm: Algorithm, wire: str = "fp32", feedback: bool = False,
    chunk_elems: int = 64, in_flight: int = 3,
) -> EngineReducer:  # fmt: skip
    two_levels = algorithm in (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING)
    return EngineReducer(
        world.transport(topology),
        comm=world.duplicate(),
        levels=topology if two_levels else one_rank_nodes(topology.num_ranks),
        algorithm=algorithm.value,
        exchange="ring" if "ring" in algorithm.value else "direct",
        codec=codec_named(wire),
        feedback=feedback,
        chunk_elems=chunk_elems,
        in_flight=in_flight,
    )


def sum_all(reducer: BucketReducer, count: int) -> None:
    """Every bucket, all under way at once, begun in order."""
    in_flight = [reducer.reduce(number) for number in range(count)]
    while in_flight:
        progressed = False
        for one in list(in_flight):
            looked = next(one, None)
            if looked is None:
                in_flight.remove(one)
            progressed |= looked is not False
        if not progressed:
            time.sleep(50e-6)  # let the other threads run


def values_of(rank: int, numel: int, *, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def bound(values: list[torch.Tensor], *, wire: str, algorithm: Algorithm, num_nodes: int) -> float:
    """Largest error of an element: so many encodings of sums that are at most the sum of the magnitudes."""
    if not values[0].numel():
        return 0.0
    largest = float(sum(v.abs() for v in (v.double() for v in values)).max())
    encodings = num_nodes if "ring" in algorithm.value else 2
    lossy = encodings * 1.2 * ROUNDING[wire] * largest + (2.0**-24 if wire == "fp16" else 0.0)
    exact = len(values) * torch.finfo(values[0].dtype).eps * largest
    return lossy + exact


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


# ---------------------------------------------------------------------- error feedback

SPECS = [GradientSpec(30, torch.float32), GradientSpec(700, torch.float32), GradientSpec(3, torch.float32)]


def feed(
    world: ThreadsWorld, topology: Topology, *, steps: range, bucket_bytes: int = 1600,
    load: dict[str, torch.Tensor] | None = None, algorithm: Algorithm = Algorithm.HIERARCHICAL,
) -> tuple[list[list[torch.Tensor]], list[StateTensor]]:  # fmt: skip
    """Sums by int8 of the same gradients again and again: by bucket, every step's; and the state after them."""
    reducer = engine(world, topology, algorithm=algorithm, wire="int8", feedback=True)
    buckets = plan_buckets(SPECS, bucket_bytes=bucket_bytes)
    buffers = reducer.plan(buckets, device=CPU)
    if load is not None:
        reducer.load_state(load)
    sums = []
    for _ in steps:
        for bucket, buffer in zip(buckets, buffers, strict=True):
            buffer.zero_()
            for slot in bucket.slots:
                values = values_of(world.rank, slot.numel, dtype=torch.float32, seed=slot.parameter)
                buffer[slot.offset : slot.offset + slot.numel] = values
        sum_all(reducer, len(buckets))
        reducer.settle(applied=True, rescale=1.0)
        space = torch.zeros(733)
        for bucket, buffer in zip(buckets, buffers, strict=True):
            for slot in bucket.slots:
                space[slot.position : slot.position + slot.numel] = buffer[
                    slot.offset : slot.offset + slot.numel
                ]
        sums.append(space)
    state = [StateTensor(name=t.name, tensor=t.tensor.clone(), global_shape=t.global_shape, offset=t.offset)
             for t in reducer.state()]  # fmt: skip
    reducer.close()
    return sums, state


def gathered(states: list[list[StateTensor]]) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: every element written exactly once."""
    whole: dict[str, torch.Tensor] = {}
    for state in states:
        for part in state:
            target = whole.setdefault(part.name, torch.full(part.global_shape, torch.nan))
            place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape, strict=True))
            assert target[place].isnan().all()
            target[place] = part.tensor
    for tensor in whole.values():
        assert not tensor.isnan().any()
    return whole


def exact_sum(num_ranks: int) -> torch.Tensor:
    parts = [
        sum(values_of(r, spec.numel, dtype=torch.float32, seed=p).double() for r in range(num_ranks))
        for p, spec in enumerate(SPECS)
    ]
    return torch.cat(parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", OURS)
def test_what_is_lost_is_made_good_later(algorithm: Algorithm) -> None:
    """The sum of all that was delivered stays within one step's error of the sum of all gradients."""
    topology = topology_of((2, 1, 1))
    results = run_threads(
        4, lambda world: feed(world, topology, steps=range(16), algorithm=algorithm), timeout_s=120
    )
    exact = exact_sum(4)
    first = float((results[0][0][0].double() - exact).abs().max())
    delivered = torch.stack([s.double() for s in results[0][0]]).sum(0)
    assert float((delivered - 16 * exact).abs().max()) < 4 * first
    owed = gathered([state for _, state in results])["lost"].double().sum(0)
    assert torch.allclose(delivered + owed, 16 * exact, atol=1e-3)


def test_losses_restored_on_the_same_nodes_continue_to_the_bit() -> None:
    topology = topology_of((2, 1, 1))
    whole = run_threads(4, lambda world: feed(world, topology, steps=range(6)))
    half = run_threads(4, lambda world: feed(world, topology, steps=range(3)))
    saved = gathered([state for _, state in half])
    rest = run_threads(4, lambda world: feed(world, topology, steps=range(3), load=saved))
    for one, other in zip(whole[0][0][3:], rest[0][0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (3,), (2, 3)])
def test_losses_restored_on_other_nodes_keep_their_sum(layout: tuple[int, ...]) -> None:
    saved = gathered(
        [state for _, state in run_threads(4, lambda w: feed(w, topology_of((2, 1, 1)), steps=range(3)))]
    )
    other = topology_of(layout)
    states = run_threads(
        other.num_ranks,
        lambda w: feed(w, other, steps=range(0), load=saved, bucket_bytes=300),
    )
    if len(layout) == 1:
        assert states[0][1] == []  # one node encodes nothing
        return
    kept = gathered([state for _, state in states])["lost"].double().sum(0)
    assert torch.allclose(kept, saved["lost"].double().sum(0), atol=1e-6)


def test_a_skipped_step_leaves_no_losses() -> None:
    def rank_main(world: ThreadsWorld) -> float:
        reducer = engine(world, topology_of((1, 1)), algorithm=Algorithm.DIRECT, wire="int8", feedback=True)
        (buffer,) = reducer.plan(plan_buckets(SPECS[:1], bucket_bytes=1000), device=CPU)
        buffer[:30] = torch.nan
        sum_all(reducer, 1)
        reducer.settle(applied=False, rescale=0.5)
        lost = max(float(t.tensor.abs().max()) for t in reducer.state())
        reducer.close()
        return lost

    assert run_threads(2, rank_main) == [0.0, 0.0]


def test_losses_survive_another_plan_of_buckets() -> None:
    """Buckets are planned anew after the first step, in the order in which gradients became ready."""

    def rank_main(world: ThreadsWorld) -> tuple[list[StateTensor], list[StateTensor]]:
        reducer = engine(world, topology_of((1, 1)), algorithm=Algorithm.DIRECT, wire="int8", feedback=True)
        buffers = reducer.plan(plan_buckets(SPECS, bucket_bytes=1600), device=CPU)
        for buffer in buffers:
            buffer.copy_(values_of(world.rank, buffer.numel(), dtype=torch.float32))
        sum_all(reducer, len(buffers))
        reducer.settle(applied=True, rescale=1.0)
        before = [StateTensor(name=t.name, tensor=t.tensor.clone(), global_shape=t.global_shape, offset=t.offset)
                  for t in reducer.state()]  # fmt: skip
        reducer.plan(plan_buckets(SPECS, bucket_bytes=100), device=CPU)
        return before, reducer.state()

    results = run_threads(2, rank_main)
    before = gathered([r[0] for r in results])["lost"].double().sum(0)
    after = gathered([r[1] for r in results])["lost"].double().sum(0)
    assert float(before.abs().max()) > 0
    assert torch.allclose(before, after, atol=1e-6)


def test_another_plan_uses_the_shared_memory_again() -> None:
    def rank_main(world: ThreadsWorld) -> tuple[bool, list[torch.Tensor]]:
        reducer = engine(world, topology_of((2, 1)), algorithm=Algorithm.HIERARCHICAL)
        buckets = plan_buckets(SPECS, bucket_bytes=100)
        begin = (
            reducer.plan(plan_buckets(SPECS, bucket_bytes=10_000), device=CPU)[0].untyped_storage().data_ptr()
        )
        for _ in range(2):
            buffers = reducer.plan(buckets, device=CPU)
            assert all(not buffer.any() for buffer in buffers)
            for buffer in buffers:
                buffer.fill_(world.rank + 1)
            sum_all(reducer, len(buckets))
        found = [buffer.clone() for buffer in buffers]
        same = buffers[0].untyped_storage().data_ptr() == begin
        reducer.close()
        return same, found

    for same, buffers in run_threads(3, rank_main):
        assert same
        assert all(bool((buffer == 6).all()) for buffer in buffers)


def test_flags_are_not_fed_back() -> None:
    """What int8 lost of a count must not make a parameter look used in the next step."""

    def rank_main(world: ThreadsWorld) -> float:
        reducer = engine(world, topology_of((1,) * 9), algorithm=Algorithm.DIRECT, wire="int8", feedback=True)
        (bucket,) = plan_buckets(SPECS[:1], bucket_bytes=1000)
        (buffer,) = reducer.plan([bucket], device=CPU)
        for used in (1.0, 0.0):
            buffer.zero_()
            buffer[bucket.first_flag] = used
            sum_all(reducer, 1)
            reducer.settle(applied=True, rescale=1.0)
        flag = float(buffer[bucket.first_flag])
        reducer.close()
        return flag

    assert run_threads(9, rank_main) == [0.0] * 9


def test_losses_of_another_model_are_refused() -> None:
    def rank_main(world: ThreadsWorld) -> None:
        reducer = engine(world, topology_of((1, 1)), algorithm=Algorithm.DIRECT, wire="int8", feedback=True)
        reducer.plan(plan_buckets(SPECS, bucket_bytes=1600), device=CPU)
        with pytest.raises(CheckpointError, match=r"\(3, 7\).*733"):
            reducer.load_state({"lost": torch.zeros(3, 7)})
        reducer.close()

    run_threads(2, rank_main)


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
