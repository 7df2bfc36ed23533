"""The contract of an updater: `hpctrain.reduce.DistributedOptimizer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from hpctrain.comm import World, run_threads
from hpctrain.reduce import DistributedOptimizer
from hpctrain.testing.on_ranks import OnRanks

BATCH = 13  # no number of ranks from 2 to 4 divides it


class DistributedOptimizerContract(OnRanks):
    """Implement `make`. The model is small and in float64, so that N ranks equal one to 1e-10."""

    def make(
        self, world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> DistributedOptimizer:
        """Returns a new updater over all ranks of `world`. Collective."""
        raise NotImplementedError

    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_ranks_with_unequal_shares_train_as_one(self, num_ranks: int, micro_batches: int) -> None:
        (alone,) = run_threads(1, lambda world: self._train(world))
        together = run_threads(num_ranks, lambda world: self._train(world, micro_batches=micro_batches))
        for found in together:
            assert all(map(torch.equal, found["parameters"], together[0]["parameters"]))
            assert found["losses"] == together[0]["losses"]
            for one, other in zip(found["parameters"], alone["parameters"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-10)
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-6)

    def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(self) -> None:
        for found in run_threads(3, lambda world: self._train(world, infinite_at=2)):
            assert found["applied"] == [step != 2 for step in range(6)]
            assert math.isnan(found["norms"][2])
            assert all(parameter.isfinite().all() for parameter in found["parameters"])

    def test_a_step_that_is_not_accepted_leaves_everything_as_it_was(self, num_ranks: int) -> None:
        """Also if backward failed half-way on a rank, which then takes part with what it has."""
        plain = run_threads(num_ranks, lambda world: self._train(world))
        for fails in (False, True):
            dropped = run_threads(num_ranks, partial(self._train, drop_before=3, fails=fails))
            for one, other in zip(plain, dropped, strict=True):
                assert all(map(torch.equal, one["parameters"], other["parameters"]))
                assert one["losses"] == other["losses"]

    def test_resumed_equals_never_stopped(self, num_ranks: int) -> None:
        whole = run_threads(num_ranks, lambda world: self._train(world))
        resumed = run_threads(num_ranks, lambda world: self._train(world, stop_after=3))
        for one, other in zip(whole, resumed, strict=True):
            assert all(map(torch.equal, one["parameters"], other["parameters"]))

    def test_parameters_are_complete_in_memory_once_they_are_waited_for(self, num_ranks: int) -> None:
        """Also for what does not ask PyTorch, such as a view that was made before."""

        def case(world: World) -> None:
            model, updater, _ = self._begin(world)
            views = [parameter.detach() for parameter in model.parameters()]
            before = [view.clone() for view in views]
            updater.backward(
                model(torch.ones(2, 5, dtype=torch.float64)).square().mean(), weight=1 / num_ranks
            )
            updater.step()
            updater.wait_for_parameters()
            now = [view.clone() for view in views]
            assert not any(map(torch.equal, now, before))
            assert all(map(torch.equal, now, model.parameters()))
            updater.close()

        run_threads(num_ranks, case)

    def _train(
        self,
        world: World,
        *,
        micro_batches: int = 1,
        infinite_at: int = -1,
        stop_after: int = -1,
        drop_before: int = -1,
        fails: bool = False,
    ) -> dict[str, Any]:
        model, updater, optimizer = self._begin(world)
        losses, norms, applied = [], [], []
        for step in range(6):
            if step == stop_after:
                state, tensors = updater.state(), _whole(world, updater)
                saved = model.state_dict(), optimizer.state_dict()
                updater.close()
                model, updater, optimizer = self._begin(world)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                updater.load_state(state, tensors)
            x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            whole, rest = divmod(BATCH, world.num_ranks)
            first = world.rank * whole + min(world.rank, rest)
            mine = x[first : first + whole + (world.rank < rest)]
            if step == drop_before:
                self._drop(model, updater, mine, fails=fails and world.rank == world.num_ranks - 1)
            loss_of_share = 0.0
            parts = [part for part in mine.tensor_split(micro_batches) if len(part)]
            for number, part in enumerate(parts, start=1):
                loss = model(part).square().mean()
                if step == infinite_at and world.rank == world.num_ranks - 1:
                    loss = loss * math.inf
                updater.backward(loss, weight=len(part) / BATCH, last=number == len(parts))
                loss_of_share += loss.item() * len(part) / BATCH
            outcome = updater.step(sums={"loss": loss_of_share})
            losses.append(outcome.sums["loss"])
            norms.append(outcome.grad_norm)
            applied.append(outcome.applied)
        updater.close()
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
        return {"parameters": parameters, "losses": losses, "norms": norms, "applied": applied}

    def _drop(
        self, model: torch.nn.Module, updater: DistributedOptimizer, inputs: torch.Tensor, *, fails: bool
    ) -> None:
        """A step with gradients that are NaN, and that is not accepted. fails: backward ends before its first layer."""
        first, *others = model.children()
        hidden = first(inputs)
        if fails:
            hidden.register_hook(_raise)
        loss = torch.nn.Sequential(*others)(hidden).square().sum() * math.nan
        with pytest.raises(MemoryError) if fails else nullcontext():
            updater.backward(loss, weight=1.0)
        seen: list[float] = []

        def accepts(norm: float, sums: Mapping[str, float]) -> bool:
            seen.append(sums["short"])
            return False

        outcome = updater.step(sums={"short": float(fails)}, accepts=accepts)
        assert not outcome.applied
        assert seen == [outcome.sums["short"]]
        assert math.isnan(outcome.grad_norm)

    def _begin(self, world: World) -> tuple[torch.nn.Module, DistributedOptimizer, torch.optim.Optimizer]:
        random = torch.Generator().manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, self.make(world, model, optimizer), optimizer


def _raise(*_: object) -> None:
    raise MemoryError("of the test")


def _whole(world: World, updater: DistributedOptimizer) -> dict[str, torch.Tensor]:
    """The updater's tensors as a checkpoint returns them; contracts run in one process, so parts can be passed on."""
    return {held.name: held.tensor.clone() for held in updater.state_tensors()}
