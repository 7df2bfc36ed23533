"""Runs that stop before their last step: by the clock, by a signal on one rank; what is saved is read back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.checkpoint import finished_newest_first, verify
from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import StoppedEarly
from hpctrain.resilience import EndTime, StopRequest, WallClock
from tests.run_files import records_of, summary_of
from tests.sessions import carried_out

STEPS = 100


class Task:
    """A small classifier of digits whose steps take `step_s`."""

    def __init__(self, *, step_s: float = 0.0, asks_in_step: int = 0) -> None:
        self.stop = StopRequest()
        self.step_s = step_s
        self.asks_in_step = asks_in_step
        self.steps = 0
        self.model: torch.nn.Module = torch.nn.Identity()

    def build_model(self) -> torch.nn.Module:
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        for parameter in self.model.parameters():  # ranks that are threads share one random generator
            torch.nn.init.constant_(parameter, 0.01)
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.asks_in_step:
            self.stop.request("SIGUSR1")
        time.sleep(self.step_s)
        return functional.cross_entropy(model(fields["image"]), fields["label"])

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return {}

    def parameters(self) -> list[list[float]]:
        return [parameter.flatten().tolist() for parameter in self.model.parameters()]


def run(
    where: Path, task: Task, *, world: World | None = None, name: str = "run", clock: WallClock | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(where / name), "steps": STEPS},
        "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "global_batch": 20},
        "optimizer": {"name": "adamw", "lr": 0.01},
        **sections,
    }
    return carried_out(document, task, world=world, stop=task.stop, clock=clock)


def ends_in(seconds: float) -> WallClock:
    return WallClock([EndTime(at_s=time.time() + seconds, source="the test's limit")])


@pytest.mark.timing
def test_before_its_time_is_over_a_run_saves_at_one_step_and_another_start_finishes_it_to_the_bit(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(world: World) -> tuple[str, Any]:
        with pytest.raises(StoppedEarly) as caught:
            run(where, Task(step_s=0.03), world=world, clock=ends_in(5), stop={"margin_s": 4})
        again = Task()
        return str(caught.value), [run(where, again, world=world)["status"], again.parameters()]

    def uninterrupted(world: World) -> Any:
        task = Task()
        return [run(where, task, world=world, name="whole")["status"], task.parameters()]

    printed = run_threads(2, interrupted, timeout_s=300)
    records = [records_of(where / "run", "stopped", rank=rank)[-1] for rank in (0, 1)]
    assert records[0]["step"] == records[1]["step"] < STEPS
    for record in records:
        assert record["reason"] == "the test's limit"
        assert 0 < record["time_left_s"] < 4.5
        assert record["verified"] is False  # no time is left for it: less than the 5 s that leaving may take
    assert f"stopped after step {records[0]['step']} of {STEPS} (the test's limit, " in printed[0][0]
    assert "s left); the state is saved in" in printed[0][0]
    assert "(the test's limit); the run saves and stops before that" in capsys.readouterr().out
    whole = run_threads(2, uninterrupted, timeout_s=300)
    assert [again for _, again in printed] == whole


def test_a_run_whose_time_is_over_already_does_one_step(where: Path) -> None:
    for step in (1, 2):
        with pytest.raises(StoppedEarly):
            run(where, Task(), clock=ends_in(-100))
        assert summary_of(where / "run")["step"] == step
    assert summary_of(where / "run")["stopped_by"] == "the test's limit"
    assert summary_of(where / "run")["time_left_s"] < -99


def test_a_run_with_enough_time_finishes(where: Path) -> None:
    found = run(where, Task(), clock=ends_in(3600))
    assert (found["status"], found["stopped_by"], found["time_left_s"]) == ("finished", None, None)


def test_a_signal_on_one_rank_stops_all_at_one_step_and_the_rank_is_named(where: Path) -> None:
    def case(world: World) -> str:
        with pytest.raises(StoppedEarly) as caught:
            run(where, Task(asks_in_step=7 if world.rank == 1 else 0), world=world)
        return str(caught.value)

    printed = run_threads(3, case, timeout_s=300)
    assert len(set(printed)) == 1
    assert (
        f"stopped after step 7 of {STEPS} (SIGUSR1 on rank 1); the state is saved and verified" in printed[0]
    )
    assert {records_of(where / "run", "stopped", rank=rank)[-1]["step"] for rank in range(3)} == {7}
    assert summary_of(where / "run")["stopped_by"] == "SIGUSR1 on rank 1"


class DamagedOnce(StopRequest):
    """Damages the newest checkpoint when it is printed that the state is saved, as a failing disk would."""

    directory: Path

    @property
    def leave_code(self) -> int | None:
        return None

    @leave_code.setter
    def leave_code(self, code: int | None) -> None:
        if code is not None:
            newest = finished_newest_first(self.directory)[0]
            with newest.open("r+b") as file:
                file.seek(-100, 2)  # tensors are at the end
                byte = file.read(1)
                file.seek(-100, 2)
                file.write(bytes([byte[0] ^ 1]))


def test_a_state_that_reads_back_damaged_is_saved_again(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task(asks_in_step=3)
    task.stop = DamagedOnce()
    task.stop.directory = where / "run" / "checkpoints"
    with pytest.raises(StoppedEarly, match="saved and verified"):
        run(where, task)
    printed = capsys.readouterr().out
    assert "step-00000003.h5 was saved and reads back damaged: " in printed
    assert "; saving again" in printed
    (found,) = verify(where / "run" / "checkpoints", comm=SerialWorld())
    assert found.damage == ()
