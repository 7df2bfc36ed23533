"""Recipes with `reduction.schedule`, on ranks that are threads: what waits for a round, stops, guards and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import DivergedError, RecipeError, StoppedEarly, UsageError
from hpctrain.reduce.schedules import rounds
from hpctrain.run import parse_recipe
from tests.run_files import records_of, summary_of
from tests.sessions import session_over
from tests.unit.run.guards.guarded_runs import STEPS, Spoil, Task, run

SCHEDULES: dict[str, dict[str, Any]] = {
    "local-sgd": {"method": "local-sgd", "every": 7},
    "diloco": {"method": "diloco", "every": 7, "wire": "int8", "from_step": 3},
    "daso": {"method": "daso", "every": 7, "wait": 2},
}
NODES = ["n0", "n1"]
# The steps that end a round, up to the step before the last.
ENDS = {
    "local-sgd": [7, 14, 21, 28, 35],
    "diloco": [1, 2, 3, 10, 17, 24, 31, 38],
    "daso": [9, 16, 23, 30, 37],
}


class NoGradient(torch.autograd.Function):
    """The loss is finite, its gradient is not, as after an overflow in float16."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * math.nan


def on_ranks(
    where: Path, task: Task, world: World, *, schedule: str, name: str, **sections: Any
) -> list[torch.Tensor]:
    run(
        where, task, world=world, name=name, nodes=NODES, reduction={"schedule": SCHEDULES[schedule]}, **sections
    )  # fmt: skip
    return task.parameters()


@pytest.fixture
def votes_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "VOTE_EVERY_S", 0.0)


@pytest.fixture
def votes_when_rounds_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "VOTE_EVERY_S", 1e6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.usefixtures("votes_when_rounds_end")
def test_saves_and_evaluations_that_are_due_wait_for_the_end_of_the_round(where: Path, schedule: str) -> None:
    def case(world: World) -> list[list[float]]:
        task = Task()
        on_ranks(
            where, task, world, schedule=schedule, name=schedule, data={"held_out": str(where / "data")},
            telemetry={"evaluate_every_steps": 10, "metrics_every_steps": 1},
        )  # fmt: skip
        return [parameter.flatten().tolist() for parameter in task.parameters()]

    first, second = run_threads(2, case, timeout_s=300)
    assert first == second  # the last round has ended
    ends = ENDS[schedule]
    after = {due: next((end for end in ends if end >= due), None) for due in range(5, STEPS, 5)}
    saved = [record["step"] for record in records_of(where / schedule, "checkpoint")]
    assert saved == sorted({*filter(None, after.values()), STEPS})
    evaluated = [record["step"] for record in records_of(where / schedule, "evaluation")]
    assert evaluated == sorted({*filter(None, (after[due] for due in (10, 20, 30))), STEPS})
    steps = records_of(where / schedule, "step")
    assert len(steps) == STEPS
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]  # it did learn


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.usefixtures("votes_in_each_step")
def test_a_run_that_is_stopped_within_a_round_continues_to_the_bit(where: Path, schedule: str) -> None:
    def whole(world: World) -> list[torch.Tensor]:
        return on_ranks(where, Task(), world, schedule=schedule, name=f"{schedule} whole")

    def stopped(world: World) -> list[torch.Tensor]:
        task = Task()
        if world.rank == 1:
            task.spoil = asks_in(task, 11)
        with pytest.raises(StoppedEarly, match="stopped after step 11 of"):
            on_ranks(where, task, world, schedule=schedule, name=schedule)
        return on_ranks(where, Task(), world, schedule=schedule, name=schedule)

    wanted, found = run_threads(2, whole, timeout_s=300), run_threads(2, stopped, timeout_s=300)
    assert 11 not in ENDS[schedule]
    for mine, theirs in zip(wanted, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def asks_in(task: Task, step: int) -> Spoil:
    """A signal comes to this rank while it computes `step`; the loss stays as it is."""

    def asks(loss: torch.Tensor, call: int) -> torch.Tensor:
        if call == step:
            task.stop.request("SIGUSR1")
        return loss

    return asks


@pytest.mark.usefixtures("votes_when_rounds_end")
def test_without_a_vote_a_stop_waits_for_the_end_of_the_round(where: Path) -> None:
    def case(world: World) -> None:
        task = Task()
        if world.rank == 1:
            task.spoil = asks_in(task, 9)
        with pytest.raises(StoppedEarly, match="stopped after step 14 of"):
            on_ranks(where, task, world, schedule="local-sgd", name="waits")

    run_threads(2, case, timeout_s=300)


@pytest.mark.usefixtures("votes_when_rounds_end")
def test_a_worker_drops_its_own_step_if_its_gradients_are_not_finite(where: Path) -> None:
    def case(world: World) -> tuple[dict[str, Any], list[list[float]]]:
        spoils = world.rank == 1
        task = Task(spoil=lambda loss, call: loss * math.nan if spoils and call == 10 else loss)
        on_ranks(where, task, world, schedule="local-sgd", name="nan", telemetry={"metrics_every_steps": 1})
        return {}, [parameter.flatten().tolist() for parameter in task.parameters()]

    (_, first), (_, second) = run_threads(2, case, timeout_s=300)
    assert first == second
    dropped = [
        [record["step"] for record in records_of(where / "nan", "step", rank=rank) if not record["applied"]]
        for rank in range(2)
    ]
    assert dropped[0] == []
    assert dropped[1] in ([10], [])  # rank 1 may not record its steps
    assert summary_of(where / "nan")["status"] == "finished"


def test_a_worker_that_skips_too_many_steps_ends_the_run_on_all_ranks(where: Path) -> None:
    def case(world: World) -> str:
        spoils = world.rank == 1
        task = Task(spoil=lambda loss, call: NoGradient.apply(loss) if spoils and call > 3 else loss)
        with pytest.raises(DivergedError) as caught:
            on_ranks(
                where, task, world, schedule="local-sgd", name="diverges",
                optimizer={"max_skipped_in_row": 4}, guards={"max_roll_backs": 0, "loss_jump_z": 0},
            )  # fmt: skip
        return str(caught.value)

    first, second = run_threads(2, case, timeout_s=300)
    assert first == second
    assert "more than 4 steps in a row had gradients that are not finite on 1 of 2 workers" in first


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_is_rolled_back_to_the_end_of_a_round_and_goes_on(where: Path, schedule: str) -> None:
    def case(world: World) -> list[list[float]]:
        spoils = world.rank == 1
        # More than four steps in a row, the last of them in the vote that finds it, or just before.
        last = {"local-sgd": 27, "diloco": 24, "daso": 30}[schedule]
        task = Task(spoil=lambda loss, call: NoGradient.apply(loss) if spoils and 19 < call <= last else loss)
        found = run(
            where, task, world=world, name=schedule, nodes=NODES, reduction={"schedule": SCHEDULES[schedule]},
            optimizer={"max_skipped_in_row": 4}, guards={"loss_jump_z": 0},
        )  # fmt: skip
        assert (found["status"], found["roll_backs"]) == ("finished", 1)
        return [parameter.flatten().tolist() for parameter in task.parameters()]

    first, second = run_threads(2, case, timeout_s=300)
    assert first == second
    [event] = records_of(where / schedule, "roll_back")
    assert event["to_step"] in ENDS[schedule]
    assert all(math.isfinite(value) for parameter in first for value in parameter)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.usefixtures("votes_when_rounds_end")
def test_after_a_shortage_of_memory_all_ranks_compute_smaller_parts(where: Path, schedule: str) -> None:
    def case(world: World) -> tuple[int, list[list[float]]]:
        task = Task()
        task.spoil = lambda loss, call: loss
        plain = task.loss

        def loss(model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
            # Rank 1 runs out of memory from the tenth step on, which is a local one.
            task.most_rows = 5 if world.rank == 1 and task.calls >= 9 else 10**9
            return plain(model, fields)

        task.loss = loss  # type: ignore[method-assign]
        on_ranks(where, task, world, schedule=schedule, name=f"short {schedule}")
        return max(task.rows[-4:]), [parameter.flatten().tolist() for parameter in task.parameters()]

    (first_rows, first), (rows, second) = run_threads(2, case, timeout_s=300)
    assert first == second
    assert (first_rows, rows) == (5, 5)
    [event] = records_of(where / f"short {schedule}", "out_of_memory")
    assert event["step"] in ENDS[schedule]
    assert event["ranks"].startswith("rank 1 ")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a sharded optimizer": ({"parallel": {"shard": "optimizer"}}, "parallel.shard = 'optimizer'"),
    "batch norm over ranks": ({"reduction": {"sync_batch_norm": True}}, "reduction.sync_batch_norm"),
    "averages of parameters": ({"optimizer": {"ema": 0.9}}, "optimizer.ema"),
    "residuals of gradients": ({"reduction": {"wire": "int8"}}, "reduction.schedule.wire"),
    "a chosen wire": ({"reduction": {"wire": "auto"}}, "reduction.schedule.wire"),
    "a wire that leaves values out": ({"reduction": {"schedule": {"wire": "top-k"}}}, "choose a wire format"),
    "an unknown key": ({"reduction": {"schedule": {"evry": 3}}}, "there is no such key; did you mean every"),
    "no steps": ({"reduction": {"schedule": {"every": 0}}}, "greater than or equal to 1"),
    "an average that never arrives": (
        {"reduction": {"schedule": {"method": "daso", "every": 3, "wait": 3}}}, "an average must arrive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_recipe_that_does_not_compose_is_refused(case: str) -> None:
    changes, words = REFUSED[case]
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": "run", "steps": 1},
        "task": {"target": "tests:Task"},
        "data": {"train": "data", "global_batch": 8},
        "reduction": {"schedule": {"method": "local-sgd", "every": 4}},
    }
    for section, values in changes.items():
        before = document.get(section, {})
        nested = {
            key: {**before[key], **value} if isinstance(value, dict) else value
            for key, value in values.items()
        }
        document[section] = {**before, **nested}
    with pytest.raises(RecipeError, match=words):
        parse_recipe(document)


def test_a_session_refuses_the_same_with_the_same_words() -> None:
    def case(world: World) -> list[str]:
        found = []
        for schedule, make in (
            ({"method": "local-sgd"}, torch.nn.Linear),
            ({"method": "local", "every": 3}, torch.nn.Linear),
            ({"method": "diloco", "every": 3, "outer_momentum": 1.5}, torch.nn.Linear),
            ({"method": "diloco", "every": "3"}, torch.nn.Linear),
            ({"method": "daso", "every": 3, "wire": "low-rank"}, torch.nn.Linear),
            ({"method": "daso", "every": 3}, lambda a, b: torch.nn.SyncBatchNorm(a)),
            ({"method": "daso", "every": 3 + world.rank}, torch.nn.Linear),
            (None if world.rank else {"method": "daso", "every": 3}, torch.nn.Linear),
        ):
            session = session_over(world)
            model = make(4, 4)
            with pytest.raises(UsageError) as caught:
                session.distributed_optimizer(
                    model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule
                )
            found.append(str(caught.value))
        return found

    first, second = run_threads(2, case, timeout_s=300)
    assert first == second
    for text, words in zip(
        first,
        [
            "every is missing", "choose one of local-sgd, diloco, daso", "outer_momentum is 1.5", "every is '3'",
            "does not send every change", "batch normalisation over the ranks",
            "the schedule of an updater must be the same on every rank", "the schedule of an updater must be the same",
        ],
        strict=True,
    ):  # fmt: skip
        assert words in text
