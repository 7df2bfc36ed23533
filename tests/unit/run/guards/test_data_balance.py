"""Ranks with unequal shares of the data (F10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from tests.run_files import records_of
from tests.unit.run.guards.guarded_runs import Task, run


def test_a_rank_with_too_many_samples_is_reported_once_and_each_epoch_recorded(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def case(world: World) -> str:
        return str(run(where, Task(), world=world, data={"global_batch": 4}, run={"steps": 60})["status"])

    assert run_threads(3, case, timeout_s=300) == ["finished"] * 3
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 0: ")]
    assert lines == [
        "epoch 0: rank 0 had 50 samples, 50% more than the mean of 3 ranks (33.3; rank 1 had 25): the others wait for "
        "it. Ranks have equal shares if their number divides data.global_batch and no samples are left out as damaged"
    ]
    balances = records_of(where / "run", "data_balance")
    assert [balance["epoch"] for balance in balances] == [0, 1]
    assert balances[1]["samples"] == {
        "least": 25, "least_rank": 1, "mean": pytest.approx(100 / 3), "most": 50, "most_rank": 0,
    }  # fmt: skip


def test_balanced_ranks_are_not_reported(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(3, lambda world: run(where, Task(), world=world), timeout_s=300)
    assert "more than the mean" not in capsys.readouterr().out
    assert records_of(where / "run", "data_balance")[0]["samples"]["most"] == 35
