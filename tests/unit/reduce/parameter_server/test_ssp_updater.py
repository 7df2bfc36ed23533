"""Bounded staleness on ranks that are threads: equality with synchronous training, the bound, and what is refused."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpctrain.comm import World, run_threads
from hpctrain.errors import DivergedError, UsageError
from hpctrain.reduce import LossScale, ParameterRead, Ssp, SspUpdater

STEPS = 12
Optimizer = Callable[..., torch.optim.Optimizer]


def _first_model() -> torch.nn.Module:
    torch.manual_seed(7)
    # 150 elements of the first layer, so that shares end within a parameter; one parameter without dimensions.
    model = torch.nn.Sequential(torch.nn.Linear(5, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    model.register_parameter("factor", torch.nn.Parameter(torch.tensor(1.5)))
    return model


FIRST_MODEL = _first_model()


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The same on every rank: threads share PyTorch's generator."""
    return copy.deepcopy(FIRST_MODEL).to(dtype)


def loss_of(model: torch.nn.Module, *, clock: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * clock + index)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)
    loss: torch.Tensor = (model(inputs) * model.factor).square().mean()
    return loss


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def train(
    world: World,
    schedule: Ssp,
    *,
    make: Optimizer = adam,
    plain: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[torch.Tensor], list[tuple[int, int]], list[ParameterRead]]:
    """The parameters after the last step, and what this rank took and read."""
    model = make_model(dtype)
    updater = SspUpdater(make(model.parameters()), world=world, schedule=schedule, model=model)
    taken, reads = [], []
    for until in (5, STEPS):
        while (part := updater.take(until=until)) is not None:
            taken.append((part.clock, part.index))
            assert updater.last_read is not None
            reads.append(updater.last_read)
            loss = loss_of(model, clock=part.clock, index=part.index)
            if plain:
                loss.backward()
            else:
                updater.backward(loss, weight=1 / updater.num_workers)
            assert updater.step().applied
        updater.complete(until)
    found = [parameter.detach().clone() for parameter in model.parameters()]
    updater.close()
    updater.free()
    return found, taken, reads


def synchronous(
    num_workers: int, *, make: Optimizer, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    model = make_model(dtype)
    optimizer = make(model.parameters())
    for clock in range(STEPS):
        sums: list[torch.Tensor] = []
        for index in range(num_workers):
            model.zero_grad()
            (loss_of(model, clock=clock, index=index) * (1 / num_workers)).backward()
            found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            # In the order of the parts.
            sums = found if not sums else [a + b for a, b in zip(sums, found, strict=True)]
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("num_ranks", "servers", "num_workers"),
    [(1, "all", 1), (2, "all", 2), (3, "all", 3), (4, "all", 4), (2, (0,), 1), (4, (1,), 3), (4, (2, 0), 2)],
)
@pytest.mark.parametrize("make", [adam, sgd])
def test_without_staleness_the_bits_are_those_of_synchronous_training(
    num_ranks: int, servers: Any, num_workers: int, make: Optimizer
) -> None:
    schedule = Ssp(staleness=0, servers=servers)
    expected = synchronous(num_workers, make=make)
    for parameters, _, reads in run_threads(num_ranks, lambda world: train(world, schedule, make=make)):
        assert all(map(torch.equal, parameters, expected))
        assert all(read.staleness == 0 for read in reads)


def test_a_plain_backward_has_the_weight_of_one_worker() -> None:
    schedule = Ssp(staleness=0)
    [[plain, *_], *_] = run_threads(2, lambda world: train(world, schedule, plain=True, dtype=torch.float32))
    for found, expected in zip(plain, synchronous(2, make=adam, dtype=torch.float32), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("staleness", [0, 1, 3, "any"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_part_is_taken_once_and_all_ranks_end_with_the_same_parameters(
    staleness: int | str, num_ranks: int
) -> None:
    found = run_threads(num_ranks, lambda world: train(world, Ssp(staleness=staleness)))
    taken = sorted(part for _, of_rank, _ in found for part in of_rank)
    assert taken == [(clock, index) for clock in range(STEPS) for index in range(num_ranks)]
    for parameters, _, reads in found:
        assert all(map(torch.equal, parameters, found[0][0]))
        if staleness != "any":
            assert all(read.staleness <= int(staleness) for read in reads)


@pytest.mark.parametrize(("staleness", "servers"), [(0, "all"), (2, "all"), (2, (1,)), ("any", "all")])
def test_what_is_read_is_the_version_of_its_stamp(staleness: int | str, servers: Any) -> None:
    """Each update adds 1 to every parameter, so that a version's parameters are its number."""
    num_steps, num_ranks = 60, 4

    def rank_main(world: World) -> int:
        chance = random.Random(world.rank)
        model = torch.nn.Linear(50, 9, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        updater = SspUpdater(
            optimizer, world=world, schedule=Ssp(staleness=staleness, servers=servers), model=model
        )
        largest = 0
        while (part := updater.take(until=num_steps)) is not None:
            read = updater.last_read
            assert read is not None
            assert read.clock == part.clock
            # Every element is of a version that was read, in the order of the shares, and no share is older.
            values = model.weight.detach().flatten()
            shares = torch.unique_consecutive(values).tolist()
            assert set(shares) <= set(read.versions)
            if staleness != "any":
                assert min(shares) >= part.clock - int(staleness)
            largest = max(largest, part.clock - int(min(shares)))
            updater.backward(-model.weight.sum(), weight=1 / updater.num_workers)
            updater.step()
            if chance.random() < 0.2:
                time.sleep(0.004 * chance.random() * (world.rank + 1))
        updater.complete(num_steps)
        torch.testing.assert_close(model.weight.detach(), torch.full((9, 50), float(num_steps)).double())
        assert updater.figures.largest_staleness == largest
        updater.close()
        updater.free()
        return largest

    run_threads(num_ranks, rank_main)


def test_fast_ranks_go_on_for_the_steps_of_the_staleness_and_no_further() -> None:
    """The slow rank holds its part until the others cannot continue."""
    staleness, num_ranks = 3, 3
    clocks = [0] * num_ranks

    def rank_main(world: World) -> int:
        model = make_model()
        updater = SspUpdater(
            adam(model.parameters()), world=world, schedule=Ssp(staleness=staleness), model=model
        )
        furthest, held = 0, -1
        while (part := updater.take(until=20)) is not None:
            clocks[world.rank] = part.clock
            if world.rank == 0 and held < 0:
                held = part.clock
                while min(clocks[1:]) < held + staleness:  # the others reach the bound
                    time.sleep(0.001)
                time.sleep(0.2)  # and have time to pass it, if nothing held them
                furthest = max(clocks[1:]) - held
            updater.backward(loss_of(model, clock=part.clock, index=part.index), weight=1 / num_ranks)
            updater.step()
        updater.complete(20)
        updater.close()
        updater.free()
        return furthest

    assert run_threads(num_ranks, rank_main)[0] == staleness


def test_a_part_that_is_not_finite_is_left_out() -> None:
    """The update is the sum of the other parts, and a rank with nothing else ends the run."""

    def rank_main(world: World) -> tuple[list[bool], float]:
        model = torch.nn.Linear(3, 2, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        updater = SspUpdater(optimizer, world=world, schedule=Ssp(staleness=0), model=model)
        applied = []
        while (part := updater.take(until=4)) is not None:
            factor = float("nan") if (part.clock, part.index) in ((1, 0), (2, 0), (2, 1)) else 1.0
            updater.backward(-model.weight.sum() * factor, weight=1 / updater.num_workers)
            applied.append(updater.step().applied)
        updater.complete(4)
        updater.close()
        updater.free()
        return applied, float(model.weight.detach()[0, 0])

    found = run_threads(2, rank_main)
    assert sum(one.count(False) for one, _ in found) == 3
    assert [value for _, value in found] == [2.5, 2.5]

    def always(world: World) -> None:
        model = make_model()
        updater = SspUpdater(adam(model.parameters()), world=world, schedule=Ssp(staleness=0), model=model)
        while updater.take(until=100) is not None:
            updater.backward(model.factor * float("inf"), weight=1.0)
            updater.step()

    with pytest.raises(DivergedError, match="21 parts in a row"):
        run_threads(1, always)


def test_a_parameter_that_no_part_uses_keeps_its_value_and_has_no_state() -> None:
    def rank_main(world: World) -> tuple[bool, torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        updater = SspUpdater(optimizer, world=world, schedule=Ssp(staleness=0), model=model)
        while updater.take(until=3) is not None:
            loss = model[0](torch.ones(1, 5, dtype=torch.float64)).sum()
            updater.backward(loss, weight=1 / updater.num_workers)
            updater.step()
        updater.complete(3)
        updater.close()
        updater.free()
        return torch.equal(model[2].weight, make_model()[2].weight), model.factor.detach()

    assert run_threads(2, rank_main) == [(True, torch.tensor(1.5).double())] * 2


def test_the_function_before_an_update_sets_the_learning_rate_of_that_update() -> None:
    def rank_main(world: World) -> float:
        model = torch.nn.Linear(3, 2, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = SspUpdater(optimizer, world=world, schedule=Ssp(staleness=1), model=model)

        def set_rate(update: int) -> None:
            optimizer.param_groups[0]["lr"] = 10.0**update

        updater.before_update = set_rate
        while updater.take(until=4) is not None:
            updater.backward(-model.weight.sum(), weight=1 / updater.num_workers)
            updater.step()
        updater.complete(4)
        updater.close()
        updater.free()
        return float(model.weight.detach()[0, 0])

    assert run_threads(2, rank_main) == pytest.approx([1111.0, 1111.0])


def test_an_error_in_a_server_reaches_the_training() -> None:
    def rank_main(world: World) -> None:
        model = make_model()
        updater = SspUpdater(adam(model.parameters()), world=world, schedule=Ssp(staleness=0), model=model)

        def fails(update: int) -> None:
            raise ZeroDivisionError(f"in update {update}")

        updater.before_update = fails
        while (part := updater.take(until=4)) is not None:
            updater.backward(loss_of(model, clock=part.clock, index=part.index), weight=0.5)
            updater.step()

    with pytest.raises(ZeroDivisionError, match="in update 0"):
        run_threads(2, rank_main)


def refused(num_ranks: int, **options: Any) -> str:
    """The message that every rank raises."""

    def rank_main(world: World) -> str:
        model = options.get("model", make_model())
        optimizer = options.get("optimizer", adam)(model.parameters())
        schedule = Ssp(staleness=1, servers=options.get("servers", "all"))
        given = {key: options[key] for key in ("clip_norm", "loss_scale") if key in options}
        before = [group["params"][:] for group in optimizer.param_groups]
        with pytest.raises(UsageError) as caught:
            SspUpdater(optimizer, world=world, schedule=schedule, model=model, **given)
        assert caught.value.agreed
        assert all(
            a is b
            for of_group, group in zip(before, optimizer.param_groups, strict=True)
            for a, b in zip(of_group, group["params"], strict=True)
        )
        return str(caught.value)

    messages = set(run_threads(num_ranks, rank_main))
    assert len(messages) == 1
    return messages.pop()


def test_what_does_not_compose_is_refused_when_it_is_made() -> None:
    assert "servers has rank 2, but the run has the ranks 0 to 1" in refused(2, servers=(2,))
    assert "servers lists all 2 ranks" in refused(2, servers=(0, 1))
    assert "clip_norm" in refused(2, clip_norm=1.0)
    assert "a loss scale" in refused(2, loss_scale=LossScale(value=128.0))
    assert "float32 or float64 in host memory" in refused(2, model=make_model(torch.bfloat16))
    normed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert "rank 0 only serves" in refused(2, model=normed, servers=(0,))
    assert "LBFGS" in refused(1, optimizer=torch.optim.LBFGS)


def test_steps_that_would_wait_for_all_ranks_are_refused() -> None:
    def rank_main(world: World) -> None:
        model = make_model()
        updater = SspUpdater(adam(model.parameters()), world=world, schedule=Ssp(staleness=1), model=model)
        with pytest.raises(UsageError, match=r"without a batch of session\.shared_batches"):
            updater.step()
        assert updater.take(until=1) is not None
        with pytest.raises(UsageError, match=r"call session\.all_reduce after the loop"):
            updater.step(sums={"loss": 1.0})
        with pytest.raises(UsageError, match="save after the loop"):
            updater.state()
        with pytest.raises(UsageError, match="step\\(\\) was not called for the last batch"):
            updater.take(until=1)
        updater.backward(loss_of(model, clock=0, index=0), weight=1.0)
        updater.step()
        assert updater.take(until=1) is None
        updater.complete(1)
        assert updater.state()["clock"] == 1
        updater.close()
        with pytest.raises(UsageError, match="closed"):
            updater.take(until=2)

    run_threads(1, rank_main)
