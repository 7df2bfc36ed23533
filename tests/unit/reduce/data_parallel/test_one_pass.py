"""The optimizer's step in one pass over memory: the result of PyTorch's fused kernels, and what scripts see of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce import keep_layouts, use_fused_kernels
from hpctrain.reduce.data_parallel import one_pass
from hpctrain.reduce.data_parallel.one_pass import OptimizerStep

SHAPES = ((7, 3, 3, 3), (7,), (33, 65), (1,), ())
STEPS = 6
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "weight-decay": (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
}

pytestmark = pytest.mark.skipif(one_pass._COMPILED is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(name: str, *, dtype: torch.dtype = torch.float32, fused: bool = True) -> torch.optim.Optimizer:
    """An optimizer of two groups with different settings, whose parameters are the same each time."""
    numbers = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, generator=numbers).to(dtype)) for shape in SHAPES]
    kind, options = OPTIMIZERS[name]
    groups: list[dict[str, Any]] = [
        {"params": made[:3]},
        {"params": made[3:], "lr": 0.03, "weight_decay": 0.2},
    ]
    optimizer = kind(groups, lr=0.01, **options)
    if fused:
        use_fused_kernels(optimizer)
    return optimizer


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def norm_of_first(optimizer: torch.optim.Optimizer) -> float:
    gradient = parameters(optimizer)[0].grad
    assert gradient is not None
    return float(gradient.norm())


def set_gradients(optimizer: torch.optim.Optimizer, number: int, *, factor: float = 1.0) -> None:
    """Sets random gradients that depend on the number of the step only. One parameter has none in every second step."""
    drawn = torch.Generator().manual_seed(1 + number)
    for place, parameter in enumerate(parameters(optimizer)):
        gradient = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype) * factor
        parameter.grad = None if place == 1 and number % 2 else gradient


def step_of(optimizer: torch.optim.Optimizer) -> OptimizerStep:
    hooks = keep_layouts(optimizer)
    [made] = run_threads(1, lambda world: OptimizerStep(optimizer, comm=world, own_hooks=hooks))
    return made


def train(
    optimizer: torch.optim.Optimizer, *, factor: float = 0.3, step: OptimizerStep | None = None
) -> list[float]:
    """Trains STEPS steps. Returns the factors by which the gradients were scaled before PyTorch or a hook saw them."""
    scaled: list[float] = []
    step = step or step_of(optimizer)

    def scale(by: float) -> None:
        scaled.append(by)
        for parameter in parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(by)

    for number in range(STEPS):
        set_gradients(optimizer, number)
        step.step(factor, scale=scale)
    return scaled


def by_torch(optimizer: torch.optim.Optimizer, *, factor: float = 0.3) -> None:
    for number in range(STEPS):
        set_gradients(optimizer, number, factor=factor)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_pytorchs_loop_in_float64(name: str) -> None:
    optimizer, reference = make(name), make(name, dtype=torch.float64, fused=False)
    scaled = train(optimizer)
    by_torch(reference)
    has_moments = "momentum" in OPTIMIZERS[name][1] or name.startswith("adam") or name == "maximize"
    # PyTorch makes the steps in which a parameter has no moments yet.
    assert len(scaled) == (1 if has_moments else 0)
    for one, other in zip(parameters(optimizer), parameters(reference), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-7)
        for key, value in reference.state[other].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    optimizer.state[one][key].double(), value.double(), rtol=2e-6, atol=2e-7
                )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_state_continues_with_pytorchs_kernels_and_back(name: str) -> None:
    optimizer, reference = make(name), make(name)
    train(optimizer)
    by_torch(reference)
    by_torch(optimizer)
    by_torch(reference)
    train(optimizer)
    by_torch(reference)
    for one, other in zip(parameters(optimizer), parameters(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_hooks_see_scaled_gradients_and_change_no_bit() -> None:
    plain, hooked = make("adamw"), make("adamw")
    train(plain)
    step = step_of(hooked)
    seen: list[float] = []

    def see(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(norm_of_first(optimizer))

    hooked.register_step_pre_hook(see)
    hooked.register_step_post_hook(see)
    assert train(hooked, step=step) == [0.3] * STEPS
    set_gradients(hooked, STEPS - 1, factor=0.3)
    assert seen[-2:] == [pytest.approx(norm_of_first(hooked))] * 2
    assert len(seen) == 2 * STEPS
    for one, other in zip(parameters(hooked), parameters(plain), strict=True):
        assert torch.equal(one, other)


def test_a_hook_may_replace_gradients_by_others_of_another_layout() -> None:
    optimizer, reference = make("adam"), make("adam")
    step = step_of(optimizer)

    def replace(changed: torch.optim.Optimizer, *_: object) -> None:
        weight = parameters(changed)[2]
        assert weight.grad is not None
        weight.grad = (2 * weight.grad).t().contiguous().t()

    optimizer.register_step_pre_hook(replace)
    train(optimizer, step=step)
    for number in range(STEPS):
        set_gradients(reference, number, factor=0.3)
        gradient = parameters(reference)[2].grad
        assert gradient is not None
        gradient *= 2
        reference.step()
    for one, other in zip(parameters(optimizer), parameters(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_profiler_changes_no_bit_and_sees_the_step() -> None:
    plain, profiled = make("adamw"), make("adamw")
    train(plain)
    with torch.profiler.profile() as found:
        train(profiled)
    assert sum(event.name == "Optimizer.step#AdamW.step" for event in found.events()) == STEPS
    for one, other in zip(parameters(profiled), parameters(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_learning_rate_scheduler_sees_the_first_step_and_changes_the_rate(name: str) -> None:
    optimizer, reference = make(name), make(name)
    step = step_of(optimizer)
    schedulers = [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5) for made in (optimizer, reference)]
    through_pytorch: list[float] = []
    for number in range(STEPS):
        set_gradients(optimizer, number)
        set_gradients(reference, number)
        step.step(1.0, scale=through_pytorch.append)
        reference.step()
        for scheduler in schedulers:
            scheduler.step()  # warns, which fails the test, unless a step went through the optimizer's `step`
    assert (
        len(through_pytorch) == 1 if name == "sgd" else 2
    )  # AdamW: a parameter has no gradient in the first step
    for one, other in zip(parameters(optimizer), parameters(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_pytorch_steps_if_the_script_has_replaced_step_or_there_are_several_threads() -> None:
    replaced = make("adamw")
    own_step: Any = functools.wraps(replaced.step)(functools.partial(type(replaced).step, replaced))
    vars(replaced)["step"] = own_step
    assert train(replaced) == [0.3] * STEPS
    torch.set_num_threads(2)
    assert train(make("adamw")) == [0.3] * STEPS


@pytest.mark.parametrize("setting", [{"amsgrad": True}, {"fused": None}, {"lr": torch.tensor(0.01)}])
def test_pytorch_steps_with_settings_that_the_compiled_function_lacks(setting: dict[str, Any]) -> None:
    optimizer, reference = make("adam"), make("adam")
    for made in (optimizer, reference):
        made.param_groups[0].update(setting)
        if setting.get("amsgrad"):
            for parameter in made.param_groups[0]["params"]:
                made.state[parameter] = {
                    "step": torch.tensor(0.0),
                    **{
                        key: torch.zeros_like(parameter)
                        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
                    },
                }
    assert train(optimizer) == [0.3] * STEPS
    by_torch(reference)
    for one, other in zip(parameters(optimizer), parameters(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("numbers", [[1, 2, 3], [0.5] * 6, ["a"] * 6])
def test_the_compiled_functions_refuse_other_numbers(numbers: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        one_pass._COMPILED.adam(numbers, 1.0, 0.1, 0.9, 0.99, 1e-8, 0.0, True)
