"""Error feedback of the engine: what rounding loses is sent later, also after a resume."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import StateTensor
from hpctrain.topology import Topology
from tests.unit.reduce.shared_memory.transport_cases import CPU, OURS, engine, sum_all, topology_of, values_of

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
        reducer.end_step(applied=True, rescale=1.0)
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
        4, lambda world: feed(world, topology, steps=range(16), algorithm=algorithm), timeout_s=300
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
        reducer.end_step(applied=False, rescale=0.5)
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
        reducer.end_step(applied=True, rescale=1.0)
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
            reducer.end_step(applied=True, rescale=1.0)
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
