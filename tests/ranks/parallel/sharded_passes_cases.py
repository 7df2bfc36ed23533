"""What one rank does in the tests of what forward and backward of a sharded model leave behind for the next step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain import ParallelPlan
from hpctrain.distributed import group_traffic, kept_whole, local_part
from hpctrain.errors import UsageError
from hpctrain.run import Session
from tests.ranks.parallel.parallel_cases import Layers

ROWS = 2  # of each rank


class Twins:
    """A sharded model, and the same one whole on this rank, which are trained alike."""

    def __init__(self, session: Session, **reduction: str) -> None:
        torch.manual_seed(5)
        self.rank, self.num_ranks = session.rank, session.world_size
        self.alone = Layers().build_model().double()
        self.model = session.parallelize(copy.deepcopy(self.alone), ParallelPlan(shard="parameters"))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.updater = session.distributed_optimizer(self.model, optimizer, **reduction)  # type: ignore[arg-type]
        self._optimizer = torch.optim.SGD(self.alone.parameters(), lr=0.1, momentum=0.9)
        self._number = 0

    def inputs(self) -> torch.Tensor:
        """Others at each call, of all ranks, shape (num_ranks * ROWS, 3)."""
        self._number += 1
        random = torch.Generator().manual_seed(self._number)
        return torch.randn(self.num_ranks * ROWS, 3, generator=random, dtype=torch.float64)

    def loss(self, inputs: torch.Tensor) -> Any:
        mine = self.model(inputs[self.rank * ROWS :][:ROWS])
        return mine.square().mean()

    def backward(self, inputs: torch.Tensor, *, weight: float = 1.0) -> None:
        self.updater.backward(self.loss(inputs), weight=weight / self.num_ranks)

    def step_alone(self, *inputs: torch.Tensor, change: Callable[[nn.Module], None] = lambda _: None) -> None:
        """A step on the sum of the losses. change: of the gradients before it."""
        self._optimizer.zero_grad()
        for values in inputs:
            self.alone(values).square().mean().backward()
        change(self.alone)
        self._optimizer.step()

    def step(self) -> None:
        """A step like any other, of both."""
        inputs = self.inputs()
        self.backward(inputs)
        self.updater.step()
        self.step_alone(inputs)

    def difference(self) -> float:
        """The largest one of the outputs, after another step."""
        self.step()
        inputs = self.inputs()
        with torch.no_grad():
            return float((self.model(inputs) - self.alone(inputs)).abs().max())


def looked_at_between(session: Session, *, with_graph: bool) -> float:
    """Outputs are computed between backward and step, and not used for training."""
    twins = Twins(session)
    for _ in range(2):
        inputs = twins.inputs()
        twins.backward(inputs)
        with torch.set_grad_enabled(with_graph):
            twins.model(inputs)
        twins.updater.step()
        twins.step_alone(inputs)
    return twins.difference()


def evaluation_fails_between(session: Session) -> float:
    """On all ranks, between backward and step."""
    twins = Twins(session)
    for _ in range(2):
        inputs = twins.inputs()
        twins.backward(inputs)
        hook = twins.model.get_submodule("1.1").register_forward_pre_hook(fail)
        with torch.no_grad():
            caught(partial(twins.model, inputs), MemoryError)
        hook.remove()
        twins.updater.step()
        twins.step_alone(inputs)
    return twins.difference()


def changed_after_evaluation(session: Session) -> float:
    twins = Twins(session)
    twins.step()
    with torch.no_grad():
        twins.model(twins.inputs())
        for model in (twins.model, twins.alone):
            for parameter in model.parameters():
                local_part(parameter).mul_(0.5)
    return twins.difference()


def evaluation_bytes(session: Session) -> list[int]:
    """What this rank sends in each of five forwards without gradients, of which the second to fourth are together."""
    twins = Twins(session)
    twins.step()
    traffic = group_traffic()
    assert traffic is not None
    found = []

    def forward() -> None:
        before = traffic.num_bytes()
        with torch.no_grad():
            twins.model(twins.inputs())
        found.append(traffic.num_bytes() - before)

    forward()
    with kept_whole(twins.model):
        for _ in range(3):
            forward()
    forward()
    return found


def not_summed(session: Session, *, dropped: bool) -> float:
    """Gradients of `no_sync` alone, which `zero_grad` drops or `step` sums."""
    twins = Twins(session)
    twins.step()
    inputs = twins.inputs()
    with twins.updater.no_sync():
        twins.backward(inputs)
        with twins.updater.no_sync():
            twins.backward(inputs)
        twins.backward(inputs)
    if dropped:
        twins.updater.zero_grad()
    else:
        twins.updater.step()
        twins.step_alone(inputs, inputs, inputs)
    return twins.difference()


def backward_fails(session: Session) -> dict[str, Any]:
    """A backward that fails on all ranks, within a block: errors of the calls that follow, and differences from
    training alone after the gradients were dropped in three ways."""
    twins = Twins(session)
    twins.step()
    found: dict[str, Any] = {"refused": []}
    with failing(twins.model):
        caught(lambda: twins.loss(twins.inputs()).backward(), MemoryError)
    for call in (lambda: twins.backward(twins.inputs()), twins.updater.step):
        found["refused"].append(caught(call, UsageError))
    found["step"] = twins.difference()
    with failing(twins.model):
        caught(lambda: twins.backward(twins.inputs()), MemoryError)
    twins.updater.zero_grad()
    found["zero_grad"] = twins.difference()
    with failing(twins.model):
        caught(lambda: twins.backward(twins.inputs()), MemoryError)
    assert not twins.updater.step(accepts=lambda norm, sums: False).applied
    found["not accepted"] = twins.difference()
    return found


def fail(*_: Any) -> None:
    raise MemoryError("of the test")


@contextmanager
def failing(model: nn.Module) -> Iterator[None]:
    """Within it backward raises MemoryError in the middle one of the blocks."""
    block = model.get_submodule("1.1.up")
    handle = block.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    try:
        yield
    finally:
        handle.remove()


def caught(call: Any, kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return f"{'agreed: ' if getattr(error, 'agreed', False) else ''}{error}"
    return "nothing was raised"


def plain_after_dropped(session: Session) -> float:
    """A plain `loss.backward()` after a weighted one whose gradients were dropped."""
    twins = Twins(session)
    twins.backward(twins.inputs(), weight=3.0)
    twins.updater.zero_grad()
    inputs = twins.inputs()
    twins.loss(inputs).backward()
    twins.updater.step()
    twins.step_alone(inputs)
    return twins.difference()


def whole_gradients_dropped(session: Session) -> float:
    """The model's and the optimizer's own `zero_grad` drop whole gradients too, as a GAN's script calls them."""
    twins = Twins(session)
    for owner in (twins.model, twins.updater.optimizer):
        with twins.updater.no_sync():
            twins.loss(twins.inputs()).backward()
        owner.zero_grad()
        twins.step()
    return twins.difference()


def hook_of_a_gradient(session: Session) -> str:
    twins = Twins(session)
    next(twins.model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    twins.backward(twins.inputs())
    return caught(twins.updater.step, UsageError)


def _clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _clip_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _drop_some(model: nn.Module) -> None:
    for parameter in model.get_submodule("1.1").parameters():
        parameter.grad = None


def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
            parameter.grad.clamp_(min=-0.02)


def gradients_changed(session: Session, *, weighted: bool) -> float:
    """Between backward and step `.grad` is the mean over the ranks, which the script changes."""
    twins = Twins(session)
    for change in (_clip_values, _clip_norm, _drop_some, _halve):
        inputs, others = twins.inputs(), twins.inputs()
        for values in (inputs, others):  # adds up
            if weighted:
                twins.backward(values)
            else:
                twins.loss(values).backward()
        change(twins.model)
        twins.updater.step()
        twins.step_alone(inputs, others, change=change)
    return twins.difference()


def dropped_on_one_rank(session: Session) -> str:
    twins = Twins(session)
    twins.backward(twins.inputs())
    if session.rank == 0:
        _drop_some(twins.model)
    return caught(twins.updater.step, UsageError)


def closed(session: Session) -> dict[str, Any]:
    """Threads that sum gradients before and after `close`, and how far a gradient of a later backward is off."""
    twins = Twins(session, algorithm="direct")
    twins.step()

    def threads() -> int:
        return sum(thread.name.startswith("hpctrain-sharded-sums") for thread in threading.enumerate())

    found: dict[str, Any] = {"threads": [threads()]}
    twins.updater.close()
    found["threads"].append(threads())
    inputs = twins.inputs()
    twins.loss(inputs).backward()
    twins.alone.zero_grad()
    (twins.num_ranks * twins.alone(inputs).square().mean()).backward()
    pairs = zip(twins.model.parameters(), twins.alone.parameters(), strict=True)
    found["later"] = max(float((a.grad.full_tensor() - b.grad).abs().max()) for a, b in pairs)  # type: ignore[union-attr]
    return found


def passes(session: Session) -> dict[str, Any]:
    return {
        "differences": {
            "looked at between": looked_at_between(session, with_graph=False),
            "looked at between, with a graph": looked_at_between(session, with_graph=True),
            "failed between": evaluation_fails_between(session),
            "changed after an evaluation": changed_after_evaluation(session),
            "dropped before they were summed": not_summed(session, dropped=True),
            "summed by step": not_summed(session, dropped=False),
            "plain after dropped": plain_after_dropped(session),
            "whole gradients dropped": whole_gradients_dropped(session),
            "plain gradients changed": gradients_changed(session, weighted=False),
            "weighted gradients changed": gradients_changed(session, weighted=True),
        },
        "evaluation": evaluation_bytes(session),
        "failed": backward_fails(session),
        "dropped on one rank": dropped_on_one_rank(session),
        "hook": hook_of_a_gradient(session),
        "closed": closed(session),
    }
