"""Runs in which a rank is short of memory (F6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import ExitCode, LaunchError, OutOfMemory
from hpctrain.resilience import OUT_OF_MEMORY_VARIABLE
from tests.run_files import losses_of, records_of
from tests.unit.run.guards.guarded_runs import STEPS, Task, run


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_rank_out_of_memory_divides_the_batch_on_all_and_the_curve_stays_the_same(
    where: Path, in_backward: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three ranks with 7, 7 and 6 samples; rank 1 has room for 2 only: four micro-batches."""

    def short(world: World) -> list[Any]:
        task = Task(most_rows=2 if world.rank == 1 else 10**9, in_backward=in_backward)
        found = run(where, task, world=world)
        return [found["micro_batches"], found["out_of_memory"], max(task.rows[10:]), task.parameters()]

    def roomy(world: World) -> list[Any]:
        task = Task()
        found = run(where, task, world=world, name="roomy")
        return [found["micro_batches"], found["out_of_memory"], max(task.rows), task.parameters()]

    found = run_threads(3, short, timeout_s=300)
    printed = capsys.readouterr().out
    expected = run_threads(3, roomy, timeout_s=300)
    assert [entry[:3] for entry in found] == [[4, 2, 2]] * 3
    assert [entry[:2] for entry in expected] == [[1, 0]] * 3
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one[3], other[3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    curves = np.array([list(losses_of(where / "run").values()), list(losses_of(where / "roomy").values())])
    assert np.abs(curves[0] / curves[1] - 1).max() < 1e-5
    lines = [line for line in printed.splitlines() if "ran out of memory" in line]
    assert len(lines) == 2
    assert lines[0].startswith("step 1: rank 1 on ")
    assert lines[0].endswith(
        " ran out of memory, asking for 4096.0 TiB: 2 micro-batches instead of 1 from now on, of at most 4 samples; "
        "the batch is computed again"
    )
    assert [event["micro_batches"] for event in records_of(where / "run", "out_of_memory")] == [2, 4]


def test_a_restart_begins_with_the_micro_batches_that_fit(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(where, Task(most_rows=6), run={"steps": 3})["micro_batches"] == 4
    capsys.readouterr()
    again = Task(most_rows=6)
    found = run(where, again)
    assert (found["micro_batches"], found["out_of_memory"], max(again.rows)) == (4, 0, 5)
    path = where / "run" / "micro-batch.json"
    assert (
        f"micro-batches: 4 of at most 5 samples, since a rank ran out of memory before ({path}; delete it to begin "
        "with data.micro_batches = 1 again)"
    ) in capsys.readouterr().out
    remembered = json.loads(path.read_text())
    assert (remembered["samples"], remembered["step"]) == (5, 1)

    def two(world: World) -> int:  # twice the ranks, half the share: fewer micro-batches are small enough
        return int(run(where, Task(most_rows=6), world=world, run={"steps": STEPS + 2})["micro_batches"])

    assert run_threads(2, two, timeout_s=300) == [2, 2]
    path.unlink()
    assert run(where, Task(), run={"steps": STEPS + 4})["micro_batches"] == 1


def test_the_first_batch_of_a_resumed_run_that_has_more_room_is_not_limited_by_a_torn_file(
    where: Path,
) -> None:
    (where / "run").mkdir()
    (where / "run" / "micro-batch.json").write_text('{"samples": ')
    with pytest.raises(
        LaunchError, match=r"micro-batch\.json, .*: delete it to begin with data\.micro_batches again"
    ):
        run(where, Task())


def test_one_sample_cannot_be_divided(where: Path) -> None:
    def case(world: World) -> str:
        with pytest.raises(OutOfMemory) as caught:
            run(where, Task(most_rows=0 if world.rank == 1 else 10**9), world=world)
        assert (caught.value.exit_code, caught.value.agreed) == (ExitCode.OUT_OF_MEMORY, True)
        return str(caught.value)

    first, second = run_threads(2, case, timeout_s=300)
    assert first == second
    assert first.startswith("step 1: rank 1 on ")
    assert (
        "ran out of memory, asking for 4096.0 TiB in a micro-batch of one sample, which cannot be divided"
        in first
    )


def test_if_asked_to_stop_it_ends_with_code_8(where: Path) -> None:
    with pytest.raises(
        OutOfMemory, match=r"out of memory, asking for 4096\.0 TiB, in forward and backward: "
    ):
        run(where, Task(most_rows=6), guards={"out_of_memory": "stop"})
    assert not (where / "run" / "micro-batch.json").exists()


def test_another_error_of_the_task_is_raised_as_it_is(where: Path) -> None:
    def spoil(loss: torch.Tensor, step: int) -> torch.Tensor:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(where, Task(spoil=spoil))


def test_after_an_attempt_that_the_kernel_ended_each_start_begins_with_twice_the_micro_batches(
    where: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(where, Task(), run={"steps": 3})["micro_batches"] == 1
    capsys.readouterr()
    monkeypatch.setenv(OUT_OF_MEMORY_VARIABLE, "1")
    second = Task()

    def case(world: World) -> int:
        return int(run(where, second, world=world, run={"steps": 6})["micro_batches"])

    assert run_threads(2, case, timeout_s=300) == [2, 2]
    assert max(second.rows) == 5
    path = where / "run" / "micro-batch.json"
    assert (
        f"micro-batches: 2 of at most 5 samples, since attempt 1 ended out of memory ({path}; delete it to begin with "
        "data.micro_batches = 1 again)"
    ) in capsys.readouterr().out
    remembered = json.loads(path.read_text())
    assert (remembered["attempt"], remembered["samples"]) == (1, 5)
    assert [event["micro_batches"] for event in records_of(where / "run", "out_of_memory")] == [2]
    # Once more: half of what is remembered. Then, without the variable, no more than that.
    monkeypatch.setenv(OUT_OF_MEMORY_VARIABLE, "2")
    assert run(where, Task(), run={"steps": 7})["micro_batches"] == 8  # of 20 samples on one rank: 3 each
    monkeypatch.delenv(OUT_OF_MEMORY_VARIABLE)
    assert run(where, Task(), run={"steps": 8})["micro_batches"] == 8


def test_a_start_after_the_kernel_ended_one_divides_nothing_where_that_is_forbidden_or_impossible(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OUT_OF_MEMORY_VARIABLE, "1")
    assert run(where, Task(), run={"steps": 2}, guards={"out_of_memory": "stop"})["micro_batches"] == 1
    single = run(where, Task(), name="single", run={"steps": 2}, data={"micro_batches": 20})
    assert single["micro_batches"] == 20
    assert not (where / "single" / "micro-batch.json").exists()
