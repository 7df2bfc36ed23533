"""Runs in which a rank is slow for a while: what is printed, recorded and summarized."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from tests.run_files import records_of, summary_of
from tests.sessions import carried_out
from tests.tiny_task import TinyTask

pytestmark = pytest.mark.timing

STEP_S = 0.01
WINDOWS = {"window_s": 0.1, "windows": 3}


class Task(TinyTask):
    """Its steps take STEP_S, and 3 times as long on `slow_rank` in the steps of `slow`."""

    def __init__(self, *, rank: int, slow_rank: int = -1, slow: range = range(0)) -> None:
        self.step = 0
        self.slow = slow if rank == slow_rank else range(0)

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.step += 1
        time.sleep(3 * STEP_S if self.step in self.slow else STEP_S)
        return super().loss(model, fields)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    pack_arrays(tmp_path / "data", {"x": np.ones((96, 4), np.float32)})
    return tmp_path


def run(
    where: Path, world: World, *, steps: int, stragglers: dict[str, Any], nodes: list[str] | None = None, **slow: Any
) -> dict[str, Any]:  # fmt: skip
    recipe = {
        "run": {"directory": str(where / "run"), "steps": steps},
        "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "global_batch": 24},
        "checkpoint": {"every_steps": 50},
        "stragglers": stragglers,
    }  # fmt: skip
    return carried_out(recipe, Task(rank=world.rank, **slow), world=world, nodes=nodes)


def test_a_rank_that_is_slow_for_a_while_is_named_once_and_its_end_too(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["n0", "n0", "n1"]
    run_threads(
        3,
        lambda world: run(
            where, world, steps=300, stragglers=WINDOWS, nodes=nodes, slow_rank=2, slow=range(60, 160)
        ),
        timeout_s=300,
    )
    printed = [line for line in capsys.readouterr().out.splitlines() if "slow (" in line]
    assert len(printed) == 2, printed
    line = re.fullmatch(
        r"rank 2 \(n1\) is slow \(compute\): ([\d.]+) ms per step, the median of the ranks is ([\d.]+) ms, over the "
        r"last \d+ steps; the others wait ([\d.]+) ms per step for it",
        printed[0],
    )
    assert line is not None, printed
    value_ms, usual_ms, wait_ms = map(float, line.groups())
    assert value_ms > 2 * usual_ms
    assert 15 < wait_ms < 30
    assert printed[1] == "rank 2 (n1) is no longer slow (compute)"
    (began,), (ended,) = records_of(where / "run", "slow"), records_of(where / "run", "slow_ended")
    assert (began["ranks"], began["nodes"], began["cause"]) == ([2], ["n1"], "compute")
    assert 60 < began["step"] < 160 < ended["step"]
    summary = summary_of(where / "run")
    (listed,) = summary["slow"]
    assert (listed["ranks"], listed["from_step"], listed["to_step"]) == ([2], began["step"], ended["step"])
    now = json.loads((where / "run" / "slow.json").read_text())
    assert (now["slow"], now["slow_nodes"]) == ([], [])
    windows = records_of(where / "run", "ranks")
    assert {window["seconds"]["compute"]["rank"] for window in windows if 80 < window["step"] < 160} == {2}
    assert not records_of(where / "run", "slow", rank=1)
    assert all(
        "own_write" in record["seconds"]
        for record in records_of(where / "run", "step")
        if record["step"] == 50
    )
    assert (
        records_of(where / "run", "probe")[0]["step"] < 60
    )  # after the first window; a busy machine makes it probe again


def test_a_rank_that_is_slow_to_the_end_stays_in_the_file_for_the_next_start(where: Path) -> None:
    run_threads(
        2,
        lambda world: run(
            where, world, steps=100, stragglers=WINDOWS, nodes=["n0", "n1"], slow_rank=1, slow=range(500)
        ),
        timeout_s=300,
    )
    now = json.loads((where / "run" / "slow.json").read_text())
    assert now["slow_nodes"] == ["n1"]
    assert [slow["cause"] for slow in now["slow"]] == ["compute"]
    assert summary_of(where / "run")["slow"][0]["to_step"] is None


@pytest.mark.parametrize("find", [True, False])
def test_healthy_ranks_are_not_named_and_nothing_is_compared_where_the_recipe_says_so(
    where: Path, capsys: pytest.CaptureFixture[str], find: bool
) -> None:
    stragglers = {**WINDOWS, "find": find, "probe": "start"}
    run_threads(
        2,
        lambda world: run(where, world, steps=60, stragglers=stragglers, nodes=["n0", "n1"]),
        timeout_s=300,
    )
    printed = capsys.readouterr().out
    assert "is slow (" not in printed
    assert bool(records_of(where / "run", "ranks")) is find
    if find:  # the links are known from the start: the first window asks for no probe
        first_window = records_of(where / "run", "ranks")[0]["step"]
        assert all(probe["step"] > first_window for probe in records_of(where / "run", "probe"))
    else:
        assert not records_of(where / "run", "probe")
    assert "probe of the nodes, " in printed
    probe = json.loads((where / "run" / "probe.json").read_text())
    assert [node["node"] for node in probe["nodes"]] == ["n0", "n1"]
    assert probe["nodes"][0]["bytes_per_s"] > 1e6
    assert not (where / "run" / "slow.json").exists()
