"""Gradients lie in the buckets: what a script, an optimizer and torch see of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import UsageError
from hpctrain.reduce import AllReduceUpdater, LossScale
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import LocalReducer
from tests.unit.reduce.data_parallel.updater_cases import Net, batch, make, on_threads, reducer_for

VIEWED = [torch.float32, torch.float64]
COPIED = [torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


class Parts(torch.nn.Module):
    """A parameter of each dtype, one channels last, one transposed, one empty. Its gradient is itself."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        values = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        images = torch.randn(2, 3, 4, 5, generator=generator)
        turned = torch.randn(5, 2, generator=generator).T
        self.parts = torch.nn.ParameterList([
            *(torch.nn.Parameter(values.to(dtype)) for dtype in (*VIEWED, *COPIED)),
            torch.nn.Parameter(images.to(memory_format=torch.channels_last)), torch.nn.Parameter(turned),
            torch.nn.Parameter(torch.empty(0, 3)),
        ])  # fmt: skip

    def forward(self) -> torch.Tensor:
        squares = [p.abs().double().pow(2).sum() for p in self.parts]
        return torch.stack(squares).sum() / 2


def alone(
    parameters: Iterable[torch.nn.Parameter], *, reducer: BucketReducer | None = None, **options: Any
) -> AllReduceUpdater:
    """On one rank; a step takes the gradient off the parameter."""
    optimizer = torch.optim.SGD(parameters, lr=options.pop("lr", 1.0))
    return AllReduceUpdater(optimizer, comm=SerialWorld(), reducer=reducer or LocalReducer(), **options)


class Buffers:
    """The buffers that a reducer has planned, caught on their way."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer
        self.buffers: list[torch.Tensor] = []

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        self.buffers = self._reducer.plan(buckets, device=device)
        return self.buffers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def overlap(gradient: torch.Tensor, buffer: torch.Tensor) -> bool:
    return gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gradient_is_a_view_of_its_place_in_the_bucket(num_ranks: int) -> None:
    def case(world: World) -> None:
        reducer = Buffers(reducer_for(world))
        net, updater = make(world, reducer=reducer)
        x, y = batch(0, torch.float64)
        updater.backward(functional.cross_entropy(net(x, with_rare=True), y), weight=1.0)
        updater.synchronize()
        parameters = list(net.parameters())
        for bucket, buffer in zip(updater.buckets, reducer.buffers, strict=True):
            for slot in bucket.slots:
                gradient = parameters[slot.parameter].grad
                assert gradient is not None
                assert gradient.data_ptr() == buffer[slot.offset :].data_ptr()
                assert gradient.shape == parameters[slot.parameter].shape
        updater.step()
        assert all(p.grad is None for p in parameters)
        updater.close()

    on_threads(num_ranks, case)


@pytest.mark.parametrize("loss_scale", [1.0, 64.0])
def test_every_dtype_and_layout_gets_its_gradient(loss_scale: float) -> None:
    model = Parts()
    before = [p.detach().clone() for p in model.parts]
    updater = alone(model.parameters(), lr=0.25, loss_scale=LossScale(value=loss_scale), bucket_bytes=100)
    updater.backward(model(), weight=1.0)
    for parameter in model.parts:
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
    norm = float(torch.stack([p.abs().double().pow(2).sum() for p in before]).sum().sqrt())
    assert updater.step().grad_norm == pytest.approx(norm, rel=1e-6)
    for start, parameter in zip(before, model.parts, strict=True):
        torch.testing.assert_close(parameter.detach(), 0.75 * start)
    updater.close()


def test_only_gradients_of_the_buckets_dtype_are_views() -> None:
    model = Parts()
    reducer = Buffers(LocalReducer())
    updater = alone(model.parameters(), reducer=reducer)
    model().backward()
    updater.synchronize()
    for parameter in model.parts:
        assert parameter.grad is not None
        viewed = any(overlap(parameter.grad, buffer) for buffer in reducer.buffers)
        assert viewed == (parameter.dtype in VIEWED)
    updater.close()


def test_half_precision_gradients_are_summed_in_float32() -> None:
    """2048 + 1 is 2048 in either half type, and less 2048 it would be nothing."""

    def case(world: World) -> list[float]:
        weights = [torch.nn.Parameter(torch.zeros(1, dtype=d)) for d in (torch.bfloat16, torch.float16)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer_for(world), bucket_bytes=8)
        slope = (2048.0, 1.0, -2048.0)[world.rank]
        updater.backward(sum(w.sum().float() * slope for w in weights), weight=1.0)
        updater.step()
        updater.close()
        return [float(w.detach()) for w in weights]

    assert on_threads(3, case) == [[-1.0, -1.0]] * 3


def test_a_sum_that_float16_cannot_hold_skips_the_step_on_all_ranks() -> None:
    def case(world: World) -> tuple[bool, float]:
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer_for(world))
        updater.backward((weight * 40000).sum().float(), weight=1.0)  # 80000 is not a float16
        outcome = updater.step()
        updater.close()
        return outcome.applied, float(weight.detach()[0])

    assert on_threads(2, case) == [(False, 1.0)] * 2


def test_gradients_with_a_graph_of_their_own_are_taken() -> None:
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    updater = alone([weight])
    with pytest.warns(UserWarning, match="create_graph"):
        weight.pow(2).sum().backward(create_graph=True)
    updater.step()
    assert weight.detach().tolist() == [-2.0] * 3
    updater.close()


class Remembering(torch.optim.Optimizer):
    """Steps by the difference to the gradient before, which it keeps as it was handed out."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params, {})
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad - self.kept.get(p, torch.zeros_like(p)))
                self.kept[p] = p.grad


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_optimizer_may_keep_a_gradient(num_ranks: int) -> None:
    def case(world: World) -> tuple[list[float], bool]:
        weights = [torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.bfloat16)]
        optimizer = Remembering(weights)
        reducer = Buffers(reducer_for(world))
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer)
        values = []
        for slope in (1.0, 4.0, 6.0):
            updater.backward(sum(w.sum() for w in weights) * slope, weight=1 / world.num_ranks)
            updater.step()
            values.append(float(weights[0].detach()[0]))
        kept_in_bucket = any(overlap(g, reducer.buffers[0]) for g in optimizer.kept.values())
        updater.close()
        return values, kept_in_bucket

    # steps of 1 - 0, 4 - 1, 6 - 4
    assert on_threads(num_ranks, case) == [([-1.0, -4.0, -6.0], False)] * num_ranks


def test_closing_between_backward_and_step_leaves_gradients_of_their_own() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    reducer = Buffers(LocalReducer())
    updater = alone([weight], reducer=reducer)
    (3 * weight).sum().backward()
    updater.close()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
    assert not overlap(weight.grad, reducer.buffers[0])
    (3 * weight).sum().backward()  # no hook is left
    assert weight.grad.tolist() == [6.0, 6.0]


def test_a_gradient_the_script_has_set_before_backward_is_added_to() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    updater = alone([weight])
    weight.grad = torch.ones(2)
    (3 * weight).sum().backward()
    updater.step()
    assert weight.detach().tolist() == [-4.0, -4.0]
    updater.close()


def test_sparse_gradients_of_some_ranks_become_dense_views() -> None:
    def case(world: World) -> tuple[list[float], bool]:
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        reducer = Buffers(reducer_for(world))
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer)
        viewed = True
        for _ in range(2):
            if world.rank != 1:  # that one has none
                updater.backward(table(torch.tensor([world.rank, world.rank])).sum(), weight=1.0)
            updater.synchronize()
            viewed &= overlap(table.weight.grad, reducer.buffers[0])
            updater.step()
        updater.close()
        return table.weight.detach()[:, 0].tolist(), viewed

    assert on_threads(3, case) == [([-4.0, 0.0, -4.0, 0.0], True)] * 3


def test_parameters_on_two_devices_are_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(UsageError, match="cpu, meta"):
        alone(weights)


def test_clipping_and_unscaling_are_one_factor() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    updater = alone([weight], loss_scale=LossScale(value=8.0), clip_norm=1.0)
    updater.backward((3 * weight).sum(), weight=1.0)
    assert updater.step().grad_norm == pytest.approx(6.0)
    assert weight.detach().tolist() == pytest.approx([-0.5] * 4)
    updater.close()


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 3_000_001])
def test_the_norm_of_many_elements_is_as_exact_as_that_of_few(numel: int) -> None:
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (numel, 3)]
    updater = alone(weights, bucket_bytes=2**30)
    updater.backward(sum(0.1 * weight.sum() for weight in weights), weight=1.0)
    assert updater.step().grad_norm == pytest.approx(0.1 * (numel + 3) ** 0.5, rel=1e-6)
    updater.close()


def test_a_norm_that_float32_cannot_hold_is_a_norm() -> None:
    weight = torch.nn.Parameter(torch.zeros(2000))
    updater = alone([weight], lr=1e-30)
    updater.backward((1e30 * weight).sum(), weight=1.0)
    outcome = updater.step()
    assert outcome.applied
    assert outcome.grad_norm == pytest.approx(1e30 * 2000**0.5, rel=1e-6)
    updater.close()


def test_a_tensor_over_the_same_memory_may_be_written_to_between_steps() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    updater = alone([weight])
    for _ in range(3):
        updater.backward(weight.sum(), weight=1.0)
        updater.synchronize()
        assert weight.grad is not None
        kept = weight.grad.detach()
        updater.step()
        kept.zero_()
    assert weight.detach().tolist() == [-3.0] * 3
    updater.close()


def test_a_net_of_half_precision_trains_on_three_ranks_as_on_one() -> None:
    def case(world: World) -> list[torch.Tensor]:
        net, updater = make(world, dtype=torch.bfloat16)
        for step in range(3):
            x, y = batch(step, torch.bfloat16)
            loss = functional.cross_entropy(net(x).float(), y)  # all samples on each rank: the mean is theirs
            updater.backward(loss, weight=1 / world.num_ranks)
            updater.step()
        updater.close()
        return [p.detach().clone() for p in net.parameters()]

    whole = on_threads(1, case)[0]
    for found in on_threads(3, case):
        for a, b, start in zip(found, whole, Net(torch.bfloat16).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            assert a.dtype is start.dtype
