"""Parameters are gathered while training continues; whatever uses one waits for it, and nothing else does."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.comm import World, run_threads
from hpctrain.errors import CommunicationError
from hpctrain.reduce import ZeroUpdater
from hpctrain.reduce.zero.units_in_flight import ArrivingParameter, has_compiled
from tests.unit.reduce.zero.zero_cases import Net, Plan, make_updater, net_of, samples, take_step

PLAN = Plan(shard="gradients", layout="ab", bucket_bytes=1000, rare_at=())


class Held:
    """A reducer's gatherings, which wait until `gate` is set. begun: the units, in this order."""

    def __init__(self, reducer: Any) -> None:
        self.gate, self.begun = threading.Event(), list[int]()
        self._really = reducer.all_gather
        reducer.all_gather = self._all_gather

    def _all_gather(self, number: int) -> Iterator[bool]:
        self.begun.append(number)
        while not self.gate.is_set():
            yield False
        yield from self._really(number)


def on_two_ranks(case: Callable[[World, Net, ZeroUpdater, Held], Any], *, plan: Plan = PLAN) -> list[Any]:
    def on_a_rank(world: World) -> Any:
        net = net_of(plan.dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        updater, reducer = make_updater(world, plan, optimizer)
        assert isinstance(updater, ZeroUpdater)
        found = case(world, net, updater, Held(reducer))
        updater.close()
        reducer.close()
        return found

    return run_threads(2, on_a_rank, timeout_s=300)


def saved(net: Net) -> list[torch.Tensor]:
    torch.save(net, buffer := io.BytesIO())
    buffer.seek(0)
    return list(torch.load(buffer, weights_only=False).parameters())


READS: dict[str, Callable[[Net], object]] = {
    "forward": lambda net: net(samples(9, torch.float32)),
    "the parameters": lambda net: [parameter.detach().clone() for parameter in net.parameters()],
    "state_dict": lambda net: [tensor.clone() for tensor in net.state_dict().values()],
    "a copy": lambda net: list(copy.deepcopy(net).parameters()),
    "a file": saved,
    "one function of many": lambda net: torch._foreach_norm(list(net.parameters())),
    "numpy": lambda net: net.wide.weight.detach().numpy().copy(),
    "a child's parameter": lambda net: torch.nn.functional.linear(torch.ones(2, 36), net.wide.weight),
    "data": lambda net: net.wide.weight.data.clone(),
    "a loss of the parameters": lambda net: sum(parameter.square().sum() for parameter in net.parameters()),
}


@pytest.mark.parametrize("how", READS)
def test_whatever_reads_a_parameter_waits_for_it(how: str) -> None:
    def case(world: World, net: Net, updater: ZeroUpdater, held: Held) -> None:
        take_step(world, net, updater, PLAN, 0)
        assert isinstance(net.wide.weight, ArrivingParameter)
        assert isinstance(net.wide.weight, nn.Parameter)
        threading.Timer(0.2, held.gate.set).start()
        first = READS[how](net)
        assert held.gate.is_set()
        updater.wait_for_parameters()
        assert not any(isinstance(parameter, ArrivingParameter) for parameter in net.parameters())
        again = READS[how](net)
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        if isinstance(first, list):
            assert not any(isinstance(tensor, ArrivingParameter) for tensor in first)

    on_two_ranks(case)


def test_what_reads_no_elements_does_not_wait() -> None:
    def case(world: World, net: Net, updater: ZeroUpdater, held: Held) -> None:
        take_step(world, net, updater, PLAN, 0)
        for parameter in net.parameters():
            assert parameter.grad is None
            assert (parameter.numel(), parameter.dim()) == (parameter.shape.numel(), parameter.ndim)
            assert (parameter.dtype, parameter.device.type) == (torch.float32, "cpu")
            assert parameter.requires_grad
            assert parameter.is_leaf
        net.zero_grad()
        assert all(isinstance(parameter, ArrivingParameter) for parameter in net.parameters())
        held.gate.set()

    on_two_ranks(case)


def test_a_view_made_before_is_complete_after_waiting() -> None:
    def case(world: World, net: Net, updater: ZeroUpdater, held: Held) -> None:
        view = net.wide.weight.detach()
        take_step(world, net, updater, PLAN, 0)
        threading.Timer(0.2, held.gate.set).start()
        updater.wait_for_parameters()
        assert torch.equal(view, net.wide.weight)

    on_two_ranks(case)


def test_parameters_are_gathered_in_the_order_of_forward() -> None:
    """The layer that is registered last is used first."""

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(40, 3), nn.Linear(7, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(x))
            return found

    def case(world: World) -> list[int]:
        model = Swapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan(shard="optimizer", layout="ab", bucket_bytes=1300)
        updater, reducer = make_updater(world, plan, optimizer)
        held = Held(reducer)
        held.gate.set()
        for _ in range(2):
            updater.backward(model(torch.ones(2, 7)).sum(), weight=0.5)
            updater.step()
        updater.close()
        reducer.close()
        return held.begun

    # Unit 0 is the layer that is registered last. In the first step the order of forward is not known.
    for begun in run_threads(2, case, timeout_s=300):
        assert begun == [1, 0, 0, 1]


def test_training_goes_on_with_the_bits_of_a_step_that_waits() -> None:
    def case(world: World, net: Net, updater: ZeroUpdater, held: Held) -> list[torch.Tensor]:
        for step in range(4):
            held.gate.clear()
            take = threading.Timer(0.05, held.gate.set)
            take.start()
            take_step(world, net, updater, PLAN, step)
            if waits[0]:
                updater.wait_for_parameters()
        return [parameter.detach().clone() for parameter in net.parameters()]

    waits = [True]
    expected = on_two_ranks(case)
    waits = [False]
    for one, other in zip(on_two_ranks(case), expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_an_error_of_a_gathering_is_raised_wherever_parameters_are_used_and_by_step() -> None:
    def broken(number: int) -> Iterator[bool]:
        yield False
        raise CommunicationError(f"unit {number} was lost")

    def case(world: World) -> None:
        for reads in (True, False):
            net = net_of(torch.float32)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            updater, reducer = make_updater(world, PLAN, optimizer)
            reducer.all_gather = broken
            take_step(world, net, updater, PLAN, 0)  # type: ignore[arg-type]
            if reads:
                for _ in range(2):
                    with pytest.raises(CommunicationError, match="was lost"):
                        net(samples(1, torch.float32))
                with pytest.raises(CommunicationError, match="was lost"):
                    updater.step()
                updater.close()  # it has been raised
            else:
                with pytest.raises(CommunicationError, match="was lost"):
                    updater.close()
            assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
            assert optimizer.param_groups[0]["params"][0] is next(net.parameters())

    run_threads(2, case, timeout_s=300)


def test_closing_waits_for_the_parameters() -> None:
    def case(world: World, net: Net, updater: ZeroUpdater, held: Held) -> list[torch.Tensor]:
        take_step(world, net, updater, PLAN, 0)
        threading.Timer(0.2, held.gate.set).start()
        updater.close()
        assert held.gate.is_set()
        return [parameter.detach().clone() for parameter in net.parameters()]

    one, other = on_two_ranks(case)
    assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_step_waits_where_the_use_of_a_parameter_could_not() -> None:
    """Scripted modules read parameters without PyTorch's Python functions."""

    def case(world: World, model: nn.Module) -> None:
        plan = Plan(shard="optimizer", layout="ab")
        updater, reducer = make_updater(world, plan, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        updater.backward(model(torch.ones(2, 3)).sum(), weight=0.5)
        updater.step()
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        updater.close()
        reducer.close()

    assert not has_compiled()
    models = [torch.jit.script(nn.Linear(3, 2)) for _ in range(2)]  # not in threads: that is not safe
    run_threads(2, lambda world: case(world, models[world.rank]), timeout_s=300)


def test_compiled_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", {"total": 1})
    assert has_compiled()
