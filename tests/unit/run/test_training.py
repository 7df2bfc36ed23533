"""Whole runs in this process: what a run decides at its start, its end, and when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from hpctrain.errors import CheckpointError, DataError, DivergedError, RecipeError, StoppedEarly
from tests.run_files import saved_steps, summary_of
from tests.sessions import session_over
from tests.unit.run.training_cases import SAMPLES, Task, run

# ---------------------------------------------------------------------- the end of a run


def test_a_bug_in_the_evaluation_loses_no_training_and_the_rerun_finishes(where: Path) -> None:
    with pytest.raises(KeyError):
        run(where, Task(fail_in_metrics=True))
    assert saved_steps(where / "run") == [10]
    again = Task()
    found = run(where, again)
    assert again.steps == 0
    assert found["status"] == summary_of(where / "run")["status"] == "finished"
    assert found["quality"]["accuracy"] > 0.3


def test_a_stop_in_the_last_step_finishes_the_run(where: Path) -> None:
    assert run(where, Task(stop_after=10))["status"] == "finished"
    assert summary_of(where / "run")["quality"]


def test_a_finished_run_is_left_as_it_is(where: Path) -> None:
    before = run(where, Task())
    stamp = (where / "run" / "summary.json").stat().st_mtime_ns
    assert run(where, Task()) == json.loads(json.dumps(before))
    assert (where / "run" / "summary.json").stat().st_mtime_ns == stamp


def test_a_stopped_and_a_diverged_run_have_their_summary(where: Path) -> None:
    with pytest.raises(StoppedEarly):
        run(where, Task(stop_after=4))
    assert (summary_of(where / "run")["status"], summary_of(where / "run")["step"]) == ("stopped", 4)
    with pytest.raises(DivergedError):
        run(where, Task(nan=True), optimizer={"max_skipped_in_row": 2})
    assert (summary_of(where / "run")["status"], summary_of(where / "run")["skipped_steps"]) == (
        "diverged",
        2,
    )


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize(("before", "after"), [(20, 50), (50, 20), (20, 20)])
def test_epochs_end_with_their_last_sample_also_with_another_batch(
    where: Path, before: int, after: int
) -> None:
    first, second = Task(stop_after=2), Task()
    epochs = {"steps": None, "epochs": 2}
    with pytest.raises(StoppedEarly):
        run(where, first, run=epochs, data={"global_batch": before})
    run(where, second, run=epochs, data={"global_batch": after})
    assert sorted(first.seen + second.seen) == sorted(list(range(SAMPLES)) * 2)


def test_the_last_smaller_batch_is_dropped_where_asked(where: Path) -> None:
    task = Task()
    run(where, task, run={"steps": None, "epochs": 3}, data={"global_batch": 30, "last_batch": "drop"})
    assert task.steps == 9
    assert len(task.seen) == 270


def test_a_branch_from_an_older_checkpoint_goes_on_by_itself(where: Path) -> None:
    run(where, Task(), checkpoint={"every_steps": 2, "keep": 9})
    old = where / "run" / "checkpoints" / "step-00000004.h5"
    with pytest.raises(StoppedEarly):
        run(where, Task(stop_after=1), resume=str(old), optimizer={"lr": 0.001})
    assert saved_steps(where / "run") == [2, 4, 5]  # 6, 8 and 10 are of the other branch
    assert sorted(p.name for p in (where / "run" / "previous-1").iterdir()) == [
        f"step-{step:08}.h5" for step in (6, 8, 10)
    ]
    last = Task()
    assert run(where, last, optimizer={"lr": 0.001})["resumed_from"].endswith("step-00000005.h5")
    assert last.steps == 5


def test_a_changed_option_counts_after_a_resume(where: Path) -> None:
    """Weight decay so strong that nothing is left of the weights."""
    with pytest.raises(StoppedEarly):
        run(where, Task(stop_after=5), optimizer={"weight_decay": 0.0})
    with_decay = run(where, Task(), optimizer={"weight_decay": 99.0})
    assert with_decay["loss"] > 2.2  # log 10 = 2.30: as good as guessing


def test_the_state_of_another_optimizer_is_refused(where: Path) -> None:
    run(where, Task())
    with pytest.raises(CheckpointError, match="state of AdamW, this run's optimizer is SGD"):
        run(where, Task(), run={"steps": 20}, optimizer={"name": "sgd"})


def test_a_named_checkpoint_that_is_not_there_is_an_error(where: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run(where, Task(), resume=str(where / "nothing"))


# ---------------------------------------------------------------------- ranks that were told differently


def test_ranks_with_different_recipes_are_refused(where: Path) -> None:
    def case(world: World) -> str:
        try:
            run(where, Task(), world=world, optimizer={"lr": 0.01 * (1 + world.rank)})
        except RecipeError as error:
            return str(error)
        return "no error"

    texts = run_threads(2, case, timeout_s=300)
    assert texts[0] == texts[1]
    assert "section [optimizer] of the recipe must be the same on every rank" in texts[0]


def test_ranks_with_different_data_are_refused(where: Path) -> None:
    """As with a copy on each node's own disk, one of them old."""
    fields = {"image": np.zeros((SAMPLES, 64), np.float32), "label": np.zeros(SAMPLES, np.int64)}
    pack_arrays(where / "old", {**fields, "id": np.arange(SAMPLES)})

    def case(world: World) -> str:
        session = session_over(world, nodes=["a", "b"])
        try:
            session.open_dataset(where / ("data" if world.rank == 0 else "old"))
        except DataError as error:
            return str(error)
        return "no error"

    texts = run_threads(2, case, timeout_s=300)
    for text in texts:
        assert "must be the same on every rank: rank 0" in text
