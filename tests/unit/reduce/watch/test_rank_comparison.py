"""Ranks that drift apart are found, named and refused; ranks that do not, and buffers of each rank's own, are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.distributed import ParallelPlan, ShardKind
from hpctrain.errors import ExitCode, RanksDiffer
from hpctrain.reduce import AllReduceUpdater, CompareRanks
from hpctrain.reduce.watch.rank_comparison import (
    _bytes_of,
    _device_digest,
    compares_parameters,
    describe_settings,
    digests,
)
from hpctrain.run import Session
from tests.sessions import session_over

RANKS = 3
STEPS = 130
# Called before each step on each rank, with its session, the model, the updater, and the step's number from 1.
Meddle = Callable[[Session, torch.nn.Module, Any, int], object]


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Embedding(50, 4), torch.nn.Flatten(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    )
    model.register_buffer("scale", torch.ones(3))
    model.register_buffer("tables", torch.ones(100_000))  # 400 KB
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return model


def drifts(
    meddle: Meddle, *, steps: int = STEPS, made: Callable[[], torch.nn.Module] = net, how: CompareRanks = "error",
    shard: ShardKind = "none", optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[tuple[int, str, list[str]]]:  # fmt: skip
    """Returns of each rank the step in which it got the error (0: none), the error's text, and its notes."""

    def of_rank(world: World) -> tuple[int, str, list[str]]:
        with session_over(world) as session:
            model = session.parallelize(made(), ParallelPlan(shard=shard))
            updater = session.distributed_optimizer(
                model, optimizer(model.parameters(), 0.1), compare_ranks=how
            )
            try:
                for step in range(1, steps + 1):
                    meddle(session, model, updater, step)
                    draw = torch.Generator().manual_seed(100 * step + world.rank)
                    if world.rank != 1 or step > 3:  # a rank without samples
                        model(torch.randint(0, 50, (5, 2), generator=draw)).square().mean().backward()
                    outcome = updater.step(
                        sums={"rank": world.rank}, accepts=lambda norm, sums: len(sums) == 1
                    )
                    assert outcome.sums == {"rank": 3.0}
                    assert outcome.applied
            except RanksDiffer as error:
                kinds.add((error.agreed, error.exit_code))
                return step, str(error), session.notes
            finally:
                updater.close()
            return 0, "", session.notes

    kinds: set[tuple[bool, ExitCode]] = set()
    found: list[tuple[int, str, list[str]]] = run_threads(RANKS, of_rank, timeout_s=300)
    assert kinds <= {(True, ExitCode.CHECKPOINT)}
    assert len({(step, text) for step, text, _ in found}) == 1
    return found


def nothing(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None: ...


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_ranks_that_do_the_same_are_left_alone(shard: ShardKind) -> None:
    def schedule(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        updater.param_groups[0]["lr"] = 0.1 / step

    assert drifts(schedule, shard=shard, optimizer=torch.optim.Adam) == [(0, "", [])] * RANKS


def one_row(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
    if step == 9 and session.rank == 2:
        with torch.no_grad():
            model[0].weight[33, 1] += 0.25  # type: ignore[index]


def test_one_changed_element_is_named_with_its_rank_and_amount() -> None:
    step, text, _ = drifts(one_row)[0]
    assert step == 16
    assert text.startswith(
        "the ranks no longer hold the same parameters: '0.weight' on rank 2 by up to 0.25. Something"
    )
    assert "Found at step 16 of this updater; at step 8 they were equal." in text


def test_a_late_change_is_found_too() -> None:
    def late(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        if step == 70 and session.rank == 0:
            model[3].bias.data += 1e-6  # type: ignore[index]

    step, text, _ = drifts(late)[0]
    assert step == 100
    assert "'3.bias' on rank 0 by up to 9." in text or "'3.bias' on rank 0 by up to 1" in text


def test_an_embedding_with_max_norm_is_found_in_its_first_step() -> None:
    def made() -> torch.nn.Module:
        model = net()
        model[0].max_norm = 0.5  # type: ignore[index]
        return model

    for shard in ("none", "optimizer"):
        step, text, _ = drifts(nothing, made=made, shard=shard)[0]
        assert step == 1
        assert "'0.weight' between ranks 0-2 by up to " in text
        assert "An embedding with max_norm changes the rows that a rank looks up" in text


def test_learning_rates_by_each_ranks_own_loss_are_named() -> None:
    schedules: dict[int, torch.optim.lr_scheduler.ReduceLROnPlateau] = {}

    def plateau(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        if step == 1:
            schedules[session.rank] = torch.optim.lr_scheduler.ReduceLROnPlateau(
                updater.optimizer, patience=14
            )
        schedules[session.rank].step(1.0 if session.rank == 1 else 1.0 / step)

    step, text, _ = drifts(plateau)[0]
    assert step == 16
    assert (
        "the ranks train with different learning rates: lr of parameter group 0 is 0.1 on ranks 0, 2, "
        in text
    )
    assert " on rank 1. What sets them" in text
    assert "scheduler.step(session.mean(loss))" in text


def test_other_settings_and_sharded_optimizers() -> None:
    def betas(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        if step == 12:
            updater.param_groups[0]["betas"] = (0.9, 0.999 if session.rank else 0.99)

    step, text, _ = drifts(betas, shard="optimizer", optimizer=torch.optim.Adam)[0]
    assert step == 16
    assert (
        "different settings of the optimizer: betas of parameter group 0 is (0.9, 0.99) on rank 0, (0.9, 0.999)"
        in text
    )


class Noisy(torch.optim.SGD):
    """Adds noise, as Langevin dynamics do; each thread draws its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn(parameter.shape), alpha=1e-4)


def test_an_optimizer_that_draws_random_numbers() -> None:
    step, text, _ = drifts(nothing, optimizer=Noisy)[0]
    assert step == 2
    assert "'0.weight' between ranks 0-2 by up to 0.000" in text
    assert ", and 2 more" in text
    assert "an optimizer that draws random numbers" in text


def test_a_hook_on_gradients_acts_before_the_sum_and_is_no_drift() -> None:
    def hook(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        if step == 1:
            rank = session.rank
            model[3].weight.register_hook(lambda gradient: gradient * (1 + rank))  # type: ignore[index]

    assert drifts(hook) == [(0, "", [])] * RANKS


def test_a_buffer_that_ranks_set_differently_is_said_once_and_running_statistics_never() -> None:
    def buffers(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        if step > 5:
            model.scale.fill_(float(session.rank))  # type: ignore[operator]
            model.tables.fill_(float(session.rank))  # type: ignore[operator]

    for step, text, notes in drifts(buffers):
        assert (step, text) == (0, "")
        (note,) = notes
        assert note.startswith("buffers differ between the ranks: 'scale', 'tables'. Rank 0's are saved")


def test_as_a_note_it_is_said_once_and_training_continues() -> None:
    found = drifts(one_row, how="note")
    for step, _, notes in found:
        assert step == 0
        assert len(notes) == 1
        assert notes[0].startswith(
            "WARNING: the ranks no longer hold the same parameters: '0.weight' on rank 2"
        )


def test_it_can_be_turned_off() -> None:
    assert drifts(one_row, how="off") == [(0, "", [])] * RANKS


def test_parameters_that_the_model_does_not_hold() -> None:
    def made() -> torch.nn.Module:
        model = net()
        model.__dict__["beside"] = torch.nn.Parameter(torch.zeros(3))
        return model

    def optimizer(parameters: Iterator[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, torch.nn.Parameter(torch.ones(3))], lr)

    def change(session: Session, model: torch.nn.Module, updater: Any, step: int) -> None:
        if step == 5 and session.rank == 1:
            updater.param_groups[0]["params"][-1].data += 1

    step, text, _ = drifts(change, made=made, optimizer=optimizer)[0]
    assert step == 8
    assert "'5 of parameter group 0' on rank 1 by up to 1" in text


def test_the_steps_in_which_parameters_are_compared() -> None:
    found = [step for step in range(1, 401) if compares_parameters(step)]
    assert found == [1, 2, 3, 4, 8, 16, 32, 64, 100, 200, 300, 400]


def test_digests_tell_bits_apart_whatever_the_layout_and_the_type() -> None:
    draw = torch.Generator().manual_seed(1)
    base = torch.randn(6, 8, 5, 7, generator=draw)
    for tensor in (
        base, base.to(memory_format=torch.channels_last), base.bfloat16(), base.double(), base[:, ::2],
        base[0, 0, 0, 0], base > 0, base.to(torch.int16), torch.complex(base, base).conj(), base.new_zeros(0),
    ):  # fmt: skip
        same = tensor.clone()
        (one,), (other,) = digests([tensor]), digests([same])
        assert one == other
        device = _device_digest(_bytes_of(tensor))
        assert int(device) == int(_device_digest(_bytes_of(same)))
        for place in (0, tensor.numel() // 2, tensor.numel() - 1) if tensor.numel() else ():
            changed = tensor.clone()
            where = torch.unravel_index(torch.tensor(place), tensor.shape)
            changed[where] = ~changed[where] if tensor.dtype == torch.bool else changed[where] + 1
            assert digests([changed]) != [one]
            assert int(_device_digest(_bytes_of(changed))) != int(device)


def test_settings_in_words() -> None:
    group = {
        "params": [1], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "name": "a", "foreach": None, "fused": True,
        "function": len, "momentum": 0.0, "tensor": torch.zeros(2),
    }  # fmt: skip
    assert describe_settings([group]) == {
        "lr of parameter group 0": "0.5", "betas of parameter group 0": "(0.9, 0.99)",
        "name of parameter group 0": "'a'", "foreach of parameter group 0": "None",
        "fused of parameter group 0": "True", "momentum of parameter group 0": "0.0",
    }  # fmt: skip


def test_one_rank_compares_nothing() -> None:
    def of_rank(world: World) -> bool:
        with session_over(world) as session:
            model = net()
            updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
            assert isinstance(updater, AllReduceUpdater)
            assert updater.step_watch is not None
            updater.close()
            return updater.step_watch is None

    assert run_threads(1, of_rank) == [True]
