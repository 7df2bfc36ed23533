"""PyTorch's fused kernels: where they are used, and that they give the loop's result, whatever the layout in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.distributed import ParallelPlan
from hpctrain.errors import UsageError
from hpctrain.reduce import keep_layouts, use_fused_kernels
from tests.sessions import session_over

SHAPES = ((7, 3, 3, 3), (7,), (33, 65), (1,), ())
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
}
Change = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0] if tensor.dim() else tensor


def make(name: str, *, parameters: Change = as_it_is, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters of SHAPES with random values, which are the same each time."""
    numbers = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(parameters(torch.randn(shape, generator=numbers))) for shape in SHAPES]
    kind, always = OPTIMIZERS[name]
    return kind(made, lr=0.01, **always, **options)


def make_fused(name: str, *, parameters: Change = as_it_is) -> torch.optim.Optimizer:
    optimizer = make(name, parameters=parameters)
    use_fused_kernels(optimizer)
    keep_layouts(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer, numbers: Iterable[int], *, gradients: Change = as_it_is) -> None:
    """Steps with random gradients that depend on the number of the step only."""
    for number in numbers:
        drawn = torch.Generator().manual_seed(1 + number)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = gradients(torch.randn(parameter.shape, generator=drawn))
        optimizer.step()


def assert_equal(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    pairs = zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0]["fused"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_give_the_parameters_of_the_loop(name: str) -> None:
    expected, found = make(name), make_fused(name)
    assert is_fused(found)
    step(expected, range(4))
    step(found, range(4))
    assert_equal(found, expected)


@pytest.mark.parametrize("layout", [channels_last, transposed])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_layouts_of_parameters_and_gradients_give_the_same(name: str, layout: Change) -> None:
    expected = make(name)
    step(expected, range(4))
    found = make_fused(name, parameters=layout)
    assert is_fused(found)
    step(found, range(4))
    assert_equal(found, expected)
    found = make_fused(name)
    step(found, range(4), gradients=layout)
    assert_equal(found, expected)


def test_parameters_with_gaps_in_memory_are_updated_by_the_loop_or_refused() -> None:
    expected, found = make("adamw"), make_fused("adamw", parameters=with_gaps)
    assert not is_fused(found)
    step(expected, range(2))
    step(found, range(2))
    assert_equal(found, expected)
    with pytest.raises(UsageError, match=r"parameter 0 of shape \(7, 3, 3, 3\) has gaps in memory"):
        keep_layouts(make("adamw", parameters=with_gaps, fused=True))


@pytest.mark.parametrize("layout", [as_it_is, channels_last])
@pytest.mark.parametrize("fused", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_a_saved_state_is_continued(name: str, fused: tuple[bool, bool], layout: Change) -> None:
    """With or without fused kernels before and after, and in another layout than it was saved in."""
    expected = make(name)
    step(expected, range(4))
    first, second = (make_fused(name) if each else make(name) for each in fused)
    if fused[1]:
        second = make_fused(name, parameters=layout)
    step(first, range(2))
    state = first.state_dict()
    state["param_groups"] = second.state_dict()["param_groups"]
    second.load_state_dict(state)
    with torch.no_grad():
        for one, other in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            one.copy_(other)
    step(second, range(2, 4))
    assert_equal(second, expected)


def test_an_object_that_is_no_optimizer_of_torch_is_left_alone() -> None:
    assert keep_layouts(SimpleNamespace(param_groups=[{"params": []}])) == []  # type: ignore[arg-type]


class OwnStep(torch.optim.AdamW):
    """A user's optimizer, which may have a step of its own."""


def test_what_the_script_has_set_stays() -> None:
    def group(**options: Any) -> dict[str, Any]:
        return {"params": [torch.nn.Parameter(torch.ones(3))], **options}

    groups = [
        group(),
        group(fused=False),
        group(foreach=True),
        group(lr=torch.tensor(0.1)),
        group(foreach=False),
    ]
    optimizer = torch.optim.AdamW(groups)
    assert use_fused_kernels(optimizer)
    assert [each["fused"] for each in optimizer.param_groups] == [True, False, None, None, True]
    complex_one = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], lr=0.1)
    for other in (OwnStep([group()]), torch.optim.RMSprop([group()]), complex_one):
        assert not use_fused_kernels(other)
        assert not any(each.get("fused") for each in other.param_groups)


def conv_net(layout: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.Tanh(),
        torch.nn.Conv2d(8, 4, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(100, 2),
    )
    return net.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize("asked", ["by the script", "by the argument"])
def test_ranks_train_a_model_in_channels_last_as_the_loop_does(
    num_ranks: int, shard: Any, asked: str
) -> None:
    images = torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    expected = conv_net(torch.contiguous_format)
    loop = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for _ in range(4):
        loop.zero_grad()
        expected(images).square().mean().backward()
        loop.step()

    nets = [
        conv_net(torch.channels_last) for _ in range(num_ranks)
    ]  # not in threads, which share random numbers

    def on_rank(world: World) -> list[torch.Tensor]:
        session = session_over(world, nodes="a" * num_ranks)
        model = session.parallelize(nets[world.rank], ParallelPlan(shard=shard))
        by_script = {"fused": True} if asked == "by the script" else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **by_script)
        updater = session.distributed_optimizer(
            model, optimizer, algorithm="flat", fused=asked == "by the argument"
        )
        assert is_fused(optimizer)
        mine = images.tensor_split(num_ranks)[world.rank]
        for _ in range(4):
            updater.zero_grad()
            model(mine).square().mean().backward()
            updater.step()
        updater.wait_for_parameters()
        found = [parameter.detach().clone() for parameter in model.parameters()]
        session.close()
        return found

    for found in run_threads(num_ranks, on_rank, timeout_s=60):
        for one, other in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
