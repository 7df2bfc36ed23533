"""Runs whose loss diverges (F5), and the same runs undisturbed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import open_checkpoint
from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import DivergedError, ExitCode
from tests.run_files import losses_of, records_of, saved_steps
from tests.unit.run.guards.guarded_runs import STEPS, Spoil, Task, run


def test_while_nothing_happens_a_run_with_guards_trains_the_same_bits_as_one_without(where: Path) -> None:
    off = {"loss_jump_z": 0, "max_roll_backs": 0, "out_of_memory": "stop"}
    guarded, plain = Task(), Task()
    run(where, guarded, guards={"loss_window": 10})
    run(where, plain, name="plain", guards=off)
    assert all(map(torch.equal, guarded.parameters(), plain.parameters()))
    assert losses_of(where / "run") == losses_of(where / "plain")
    for kind in ("loss_jump", "roll_back", "out_of_memory"):
        assert records_of(where / "run", kind) == []


def nan_from(first: int, last: int) -> Spoil:
    return lambda loss, step: loss * (math.nan if first <= step <= last else 1.0)


def test_after_too_many_nan_it_rolls_back_and_goes_through_with_a_lower_rate(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(where, Task(spoil=nan_from(18, 21)), optimizer={"max_skipped_in_row": 3})
    assert (found["status"], found["step"], found["roll_backs"], found["lr_factor"]) == (
        "finished",
        STEPS,
        1,
        0.5,
    )
    # Step 17 was the last to change the parameters; the checkpoint of step 20, of skipped steps, is set aside.
    assert saved_steps(where / "run/previous-1") + saved_steps(where / "run", folder="previous-1") == [20]
    printed = capsys.readouterr().out
    assert (
        "step 21: 4 steps in a row had gradients that are not finite (loss scale 1): rolled back to step 15 "
        f"({where}/run/checkpoints/step-00000015.h5); roll-back 1, the learning rate is 0.5 times the recipe's "
        "from now on"
    ) in printed
    steps = records_of(where / "run")
    assert [record["step"] for record in steps] == [*range(1, 21), *range(16, STEPS + 1)]
    assert [record["lr"] for record in steps] == [0.01] * 20 + [0.005] * (STEPS - 15)
    (event,) = records_of(where / "run", "roll_back")
    assert (event["step"], event["to_step"], event["number"], event["lr_factor"]) == (21, 15, 1, 0.5)


def test_a_restart_remembers_the_roll_back_also_one_right_after_it(where: Path) -> None:
    def spoil(loss: torch.Tensor, step: int) -> torch.Tensor:
        if step == 22:  # the first step after the roll-back
            raise KeyboardInterrupt
        return nan_from(18, 21)(loss, step)

    with pytest.raises(KeyboardInterrupt):
        run(where, Task(spoil=spoil), optimizer={"max_skipped_in_row": 3})
    assert saved_steps(where / "run")[-1] == 15
    found = run(where, Task(), optimizer={"max_skipped_in_row": 3})
    assert (found["steps_here"], found["roll_backs"], found["lr_factor"]) == (STEPS - 15, 1, 0.5)
    assert records_of(where / "run")[-1]["lr"] == 0.005
    newest = open_checkpoint(where / "run" / "checkpoints", comm=SerialWorld()).document["divergence"]
    assert (newest["num_roll_backs"], newest["rolled_back_to"]) == (1, 15)


def test_a_learning_rate_that_is_too_high_from_some_step_on_is_lowered_until_it_trains(where: Path) -> None:
    optimizer = {
        "name": "sgd", "lr": 0.1, "max_skipped_in_row": 2,
        "schedule_target": "tests.unit.run.guards.test_divergence:too_high_from_step_20",
    }  # fmt: skip
    guards = {"roll_back_lr_factor": 1e-6, "loss_window": 10}
    found = run(where, Task(), optimizer=optimizer, guards=guards)
    assert (found["status"], found["roll_backs"]) == ("finished", 1)
    assert found["loss"] < 2.3


def too_high_from_step_20(step: int, total: int) -> float:
    return 1.0 if step < 20 else 1e6


def test_a_loss_that_jumps_once_is_skipped(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(
        where, Task(spoil=lambda loss, step: loss * (1e9 if step == 30 else 1.0)), guards={"loss_window": 10}
    )
    assert (found["status"], found["skipped_steps"], found["roll_backs"]) == ("finished", 1, 0)
    assert [record["step"] for record in records_of(where / "run") if not record["applied"]] == [30]
    (event,) = records_of(where / "run", "loss_jump")
    assert (event["step"], event["loss"] > 1e8, event["grad_norm"] > 1e6) == (30, True, True)
    printed = capsys.readouterr().out
    assert "step 30 is skipped on all ranks: loss " in printed
    assert " robust standard deviations above the median of the last 10 steps (" in printed


def test_parameters_that_were_spoilt_are_rolled_back_to_a_checkpoint_from_before(where: Path) -> None:
    task = Task()

    def spoil(loss: torch.Tensor, step: int) -> torch.Tensor:
        if step == 28:  # as an update with a wild gradient would do
            with torch.no_grad():
                list(task.model.parameters())[-1][0] = 1e6
        return loss

    task.spoil = spoil
    found = run(where, task, guards={"loss_window": 10}, optimizer={"max_skipped_in_row": 4})
    assert (found["status"], found["roll_backs"], found["skipped_steps"]) == ("finished", 1, 4)
    (event,) = records_of(where / "run", "roll_back")
    assert event["to_step"] == 25
    assert found["loss"] < 1.0
    # No state was saved while steps were skipped.
    assert saved_steps(where / "run", folder="previous-1") == []


def test_at_the_limit_it_ends_with_code_7_on_all_ranks_and_says_why(where: Path) -> None:
    def case(world: World) -> str:
        task = Task(spoil=nan_from(18, 10**9))
        with pytest.raises(DivergedError) as caught:
            run(where, task, world=world, optimizer={"max_skipped_in_row": 2}, guards={"max_roll_backs": 2})
        assert (caught.value.exit_code, caught.value.agreed) == (ExitCode.DIVERGED, True)
        return str(caught.value)

    first, second = run_threads(2, case, timeout_s=300)
    assert first == second
    assert first.startswith(
        "3 steps in a row had gradients that are not finite (loss scale 1): the run has diverged."
    )
    assert first.endswith("(rolled back 2 times already (guards.max_roll_backs))")
    # The second one went to an older checkpoint: the first had not helped.
    assert [event["to_step"] for event in records_of(where / "run", "roll_back")] == [15, 10]


def test_without_a_checkpoint_from_before_it_ends(where: Path) -> None:
    with pytest.raises(DivergedError, match="there is no checkpoint from before to roll back to"):
        run(where, Task(spoil=nan_from(4, 10**9)), optimizer={"max_skipped_in_row": 2})


def test_data_on_which_it_diverged_can_be_left_out(where: Path) -> None:
    run(
        where, Task(spoil=nan_from(18, 21)), optimizer={"max_skipped_in_row": 3},
        guards={"roll_back_skips_data": True},
    )  # fmt: skip
    # Five steps per epoch. Step 16 was at the beginning of epoch 3; the data of steps 16 to 21 are left out.
    assert [record["epoch"] for record in records_of(where / "run") if record["step"] == 16] == [3, 4]
