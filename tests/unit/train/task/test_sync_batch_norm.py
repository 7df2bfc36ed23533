"""Batch normalisation over ranks that are threads, against torch's own on one rank."""

from __future__ import annotations

import copy

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.train.task.sync_batch_norm import (
    SyncBatchNorm,
    communicates_in_forward,
    convert_sync_batch_norm,
    global_statistics,
)
from tests import sync_batch_norm_cases
from tests.sync_batch_norm_cases import build_model


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_many_ranks_train_as_one_does_with_all_samples(num_ranks: int) -> None:
    assert max(run_threads(num_ranks, sync_batch_norm_cases.equals_one_rank)) < 1e-10


def test_the_state_is_that_of_the_plain_model() -> None:
    plain = build_model()
    converted = convert_sync_batch_norm(copy.deepcopy(plain), SerialWorld())
    assert communicates_in_forward(converted)
    assert not communicates_in_forward(plain)
    assert list(converted.state_dict()) == list(plain.state_dict())
    converted.load_state_dict(plain.state_dict())
    plain.load_state_dict(converted.state_dict())


def test_parameters_stay_the_same_tensors() -> None:
    model = build_model()
    before = list(model.parameters())
    convert_sync_batch_norm(model, SerialWorld())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_a_layer_alone_and_a_layer_used_twice_are_converted() -> None:
    layer = torch.nn.BatchNorm1d(3)
    model = torch.nn.Sequential(layer, torch.nn.Identity(), layer)
    convert_sync_batch_norm(model, SerialWorld())
    assert model[0] is model[2]
    assert isinstance(model[0], SyncBatchNorm)
    assert isinstance(convert_sync_batch_norm(torch.nn.BatchNorm3d(3), SerialWorld()), SyncBatchNorm)


def test_a_copy_of_a_model_goes_on_with_the_same_ranks() -> None:
    def case(world: World) -> torch.Tensor:
        model = convert_sync_batch_norm(torch.nn.BatchNorm1d(2), world.duplicate())
        return copy.deepcopy(model)(torch.full((2, 2), float(world.rank))).detach()

    low, high = run_threads(2, case)
    torch.testing.assert_close(low, torch.full((2, 2), -1.0), rtol=0, atol=1e-3)
    torch.testing.assert_close(high, torch.full((2, 2), 1.0), rtol=0, atol=1e-3)


def test_evaluation_sends_nothing() -> None:
    def case(world: World) -> None:
        model = convert_sync_batch_norm(torch.nn.BatchNorm1d(2), world.duplicate()).eval()
        if world.rank == 0:  # alone: a collective would not come to an end
            model(torch.ones(4, 2))

    run_threads(2, case, timeout_s=300)


def test_half_precision_is_normalised_in_float32() -> None:
    def case(world: World) -> None:
        model = convert_sync_batch_norm(torch.nn.BatchNorm1d(1), world.duplicate())
        values = (3000 + torch.arange(8.0).view(8, 1) * 16)[world.rank :: 2].bfloat16().requires_grad_()
        found = model(values)
        found.sum().backward()
        assert found.dtype == torch.bfloat16
        assert values.grad is not None
        assert values.grad.dtype == torch.bfloat16
        wide = torch.cat([(3000 + torch.arange(8.0) * 16)[r::2].bfloat16().double() for r in range(2)])
        expected = (wide - wide.mean()) / (wide.var(correction=0) + 1e-5).sqrt()
        mine = expected.view(2, 4)[world.rank]
        torch.testing.assert_close(found.detach().double().view(-1), mine, rtol=2**-7, atol=2**-8)

    run_threads(2, case)


def test_a_large_mean_does_not_swallow_the_variance() -> None:
    def case(world: World) -> tuple[int, float]:
        values = 1e6 + torch.tensor([0.0, 1.0, 2.0])[: 3 - world.rank].view(-1, 1)
        count, _, variance = global_statistics(values, comm=world)
        return count, float(variance)

    assert run_threads(2, case) == [(5, pytest.approx(0.56, rel=1e-6))] * 2


def test_one_value_over_all_ranks_is_refused_on_all() -> None:
    def case(world: World) -> bool:
        model = convert_sync_batch_norm(torch.nn.BatchNorm1d(2), world.duplicate())
        with pytest.raises(UsageError, match="one value") as caught:
            model(torch.ones(int(world.rank == 0), 2))
        return caught.value.agreed

    assert run_threads(2, case) == [True, True]


def test_no_samples_anywhere_change_nothing() -> None:
    def case(world: World) -> None:
        model = convert_sync_batch_norm(torch.nn.BatchNorm1d(2), world.duplicate())
        model(torch.ones(0, 2)).sum().backward()
        assert model.running_mean.tolist() == [0, 0]
        assert model.running_var.tolist() == [1, 1]
        assert model.weight.grad.tolist() == [0, 0]

    run_threads(2, case)


def test_wrong_channels_and_lazy_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="LazyBatchNorm1d"):
        convert_sync_batch_norm(torch.nn.Sequential(torch.nn.LazyBatchNorm1d()), SerialWorld())
    with pytest.raises(UsageError, match=r"\(samples, 3"):
        convert_sync_batch_norm(torch.nn.BatchNorm1d(3), SerialWorld())(torch.ones(2, 4))
