"""What a run writes for TensorBoard, read with TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.telemetry import TensorBoardSink
from tests.run_files import newest
from tests.unit.run.training_cases import Task, run

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
STEPS = 12


def test_the_files_have_what_the_records_have_also_of_steps_done_twice(where: Path) -> None:
    sections = {
        "telemetry": {"tensorboard": True, "evaluate_every_steps": 4},
        "checkpoint": {"every_steps": 4, "keep": 9},
        "optimizer": {"lr": 0.02},
    }
    run(where, Task(), **sections)
    # Another branch from step 4 on, with another rate: steps 5 to 10 are done again, and more.
    sections |= {"run": {"steps": STEPS}, "optimizer": {"lr": 0.05}}
    run(where, Task(), resume=str(where / "run/checkpoints/step-00000004.h5"), **sections)
    events = accumulator.EventAccumulator(str(where / "run/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    steps = newest(where / "run", "step")
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert steps[6]["lr"] == 0.05
    for tag, value in (
        ("loss", lambda record: record["loss"]),
        ("lr", lambda record: record["lr"]),
        ("seconds/compute", lambda record: record["seconds"]["compute"]),
    ):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == sorted(steps)
        assert [number for _, number in found] == pytest.approx(
            [value(steps[step]) for step in sorted(steps)], rel=1e-6
        )
    evaluations = newest(where / "run", "evaluation")
    found = {event.step: event.value for event in events.Scalars("evaluation/accuracy")}
    # The one at the end of the first branch, at step 10, is in the other one's past no more.
    assert found == pytest.approx({step: evaluations[step]["quality"]["accuracy"] for step in (4, 8, 12)})


def test_a_run_from_scratch_moves_the_files_aside(where: Path) -> None:
    run(where, Task(), telemetry={"tensorboard": True})
    run(where, Task(), resume="never", telemetry={"tensorboard": True})
    assert len(list((where / "run/tensorboard").iterdir())) == 1
    assert len(list((where / "run").glob("previous-*/tensorboard/events*"))) == 1


def test_a_folder_that_cannot_be_made_is_reported_and_training_goes_on(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (where / "run").mkdir()
    (where / "run/tensorboard").write_text("a file")
    assert run(where, Task(), telemetry={"tensorboard": True})["status"] == "finished"
    assert capsys.readouterr().err.count("the file for TensorBoard could not be opened") == 1


def step(number: int, loss: float) -> dict[str, Any]:
    return {
        "kind": "step", "time": 1000.0 + number, "step": number, "loss": loss, "lr": 0.1, "grad_norm": 1.0,
        "loss_scale": 1.0, "seconds": {"step": 0.1},
    }  # fmt: skip


def test_steps_after_a_roll_back_replace_those_before_it(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "new")
    sink.receive({"kind": "begins", "time": 1000.0, "step": 0})
    for number in range(1, 7):
        sink.receive(step(number, loss=1.0))
    sink.receive({"kind": "roll_back", "time": 1007.0, "step": 7, "to_step": 3})
    for number, loss in ((4, 2.0), (5, math.nan)):
        sink.receive(step(number, loss=loss))
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "new"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert found == pytest.approx({1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: math.nan}, nan_ok=True)


def test_a_full_disk_costs_one_warning(tmp_path: Path) -> None:
    """With a limit on the size of files, in a process of its own."""
    program = """
import pathlib, resource, sys
from hpctrain.telemetry import Sinks, TensorBoardSink
from tests.unit.run.tracking.test_tensorboard import step
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sinks = Sinks()
sinks.open(TensorBoardSink.name, lambda: TensorBoardSink(pathlib.Path(sys.argv[1])))
for number in range(1, 1000):
    sinks.receive(step(number, loss=1.0))
sinks.close()
print("goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "new")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "goes on\n"
    assert done.stderr.count("file for TensorBoard") == 1, done.stderr
    assert "File too large" in done.stderr
