"""Advice in a running job: in its records, its metrics and the views; and when the run asks for other nodes."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from hpctrain.errors import StoppedEarly
from hpctrain.report import make_report, read_run, write_report_json
from hpctrain.resilience import StopRequest
from hpctrain.run.nodes_advisor import WISH_VARIABLE, NodesAdvisor, NodesRequest, open_request
from hpctrain.run.recipe.load import parse_recipe
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.recipe.sections import ScalingSection
from hpctrain.scaling import NodesAdvice, RunEvidence, ScalingGoal
from hpctrain.telemetry import RunMetrics
from hpctrain.top import RunFollower, draw
from tests.run_files import newest, records_of, summary_of
from tests.sessions import carried_out
from tests.tiny_task import TinyTask
from tests.unit.scaling.test_run_evidence import BUCKETS, start, step, usual, window

STEPS = 240


class Task(TinyTask):
    """Steps whose time is proportional to the samples of a rank."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(self.sample_s * len(fields["x"]))
        return super().loss(model, fields)


def train(
    where: Path, *, num_ranks: int, stop: StopRequest | None = None, sample_s: float = 0.001, **sections: Any
) -> Path:
    """Trains on so many nodes of one rank, which are threads. Returns the run directory."""
    directory = where / "run"
    recipe: dict[str, Any] = {
        "run": {"directory": str(directory), "steps": STEPS}, "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "global_batch": 12}, "stragglers": {"window_s": 0.2},
        "reduction": {"algorithm": "direct"} if num_ranks > 1 else {}, **sections,
    }  # fmt: skip
    recipe["scaling"] = {"every_s": 0.2, **recipe.get("scaling", {})}
    nodes = [f"n{rank}" for rank in range(num_ranks)]

    def rank_main(world: World) -> object:
        own = stop if stop is not None and world.rank == 0 else None
        return carried_out(recipe, Task(sample_s), world=world, nodes=nodes, stop=own)

    run_threads(num_ranks, rank_main, timeout_s=300)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run on two nodes; the last batch of each epoch is smaller."""
    where = tmp_path_factory.mktemp("advised")
    pack_arrays(where / "data", {"x": np.ones((40, 4), np.float32)})
    return train(where, num_ranks=2)


def mean_step_s(windows: list[dict[str, Any]]) -> float:
    return sum(one["steps"] * one["step_s"] for one in windows) / sum(one["steps"] for one in windows)


def test_a_run_of_several_nodes_records_advice_from_its_own_measurements(trained: Path) -> None:
    found = records_of(trained, "scaling")
    assert found
    last = found[-1]
    assert last["step"] >= 100  # the first buckets are recorded then
    assert last["steps_left"] == STEPS - last["step"]
    assert (last["nodes"], last["goal"]) == (2, "balance")
    assert [one["nodes"] for one in last["predictions"]] == [1, 2, 3, 4, 6, 8]
    now = last["predictions"][1]
    windows = records_of(trained, "efficiency")
    seen = [one for one in windows if one["step"] <= last["step"]]
    # The thread may not have seen the newest window yet.
    assert any(now["step_s"] == pytest.approx(mean_step_s(some)) for some in (seen, seen[:-1]))
    assert now["time_s"] == pytest.approx(now["step_s"] * last["steps_left"])
    for one in last["predictions"]:
        assert sum(one["parts"].values()) == pytest.approx(one["step_s"])
        assert one["time_low_s"] <= one["time_s"] <= one["time_high_s"]
        assert one["node_hours"] == pytest.approx(one["nodes"] * one["time_s"] / 3600)
    assert not (trained / "metrics" / "rank-00001.jsonl").read_text().count('"scaling"')


def test_more_ranks_do_not_make_more_advice(trained: Path) -> None:
    found = records_of(trained, "scaling")
    assert all(b["time"] - a["time"] >= 0.19 for a, b in pairwise(found))


def test_the_view_of_a_running_run_has_a_line_and_that_of_a_finished_one_has_none(
    trained: Path, tmp_path: Path
) -> None:
    state = RunFollower(trained).refresh(now=time.time())
    assert state.advice == ""
    (tmp_path / "metrics").mkdir()
    for name in ("starts.jsonl", "metrics/rank-00000.jsonl", "metrics/rank-00001.jsonl"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    state = RunFollower(tmp_path).refresh(now=time.time())
    assert state.advice == records_of(trained, "scaling")[-1]["text"]
    lines = [str(line) for line in draw(state, width=80).renderables]
    assert f"nodes     {state.advice}" in lines


def test_the_report_has_the_advice_for_another_run_as_text_page_and_json(
    trained: Path, tmp_path: Path
) -> None:
    report = make_report([trained])
    ((label, conclusions),) = report.conclusions
    (advice,) = (one for one in conclusions if one.source.startswith("model of the step"))
    assert "node" in advice.text
    assert advice.text.endswith(".")
    (table,) = (table for table in report.tables if table.name == f"nodes-{label}")
    assert list(table.columns) == ["1", "2 (now)", "3", "4", "6", "8"]
    by_name = {row.name: row for row in table.rows}
    assert by_name["number of ranks"].values == [1, 2, 3, 4, 6, 8]
    step_s = summary_of(trained)["efficiency"]["step_s"]
    assert by_name["step"].values[1] == pytest.approx(1e3 * step_s)
    # Another run like this one has all steps to do, and need not move.
    assert by_name["time to the end"].values[1] == pytest.approx(STEPS * step_s / 3600)
    write_report_json(report, tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["schema"] == "hpctrain.report/1"
    assert advice.text in [one["text"] for one in document["conclusions"]]
    assert table.name in [one["name"] for one in document["tables"]]


def test_the_metrics_are_those_of_the_record(trained: Path) -> None:
    record = records_of(trained, "scaling")[-1]
    advised = {**record, "advised_nodes": 4}
    metrics = RunMetrics(rank=0)
    assert "hpctrain_advised_nodes" not in {metric.name for metric, _ in metrics.snapshot()}
    metrics.receive(advised)
    found = {metric.name: series[0].value for metric, series in metrics.snapshot() if len(series) == 1}
    now, then = record["predictions"][1], record["predictions"][3]
    assert found["hpctrain_advised_nodes"] == 4
    assert found["hpctrain_advised_time_ratio"] == pytest.approx(then["time_s"] / now["time_s"])
    assert found["hpctrain_advised_node_time_ratio"] == pytest.approx(then["node_hours"] / now["node_hours"])
    nothing = RunMetrics(rank=0)
    nothing.receive({**record, "predictions": []})
    assert "hpctrain_advised_nodes" not in {metric.name for metric, _ in nothing.snapshot()}


def test_a_run_on_one_rank_says_what_is_missing_or_uses_the_given_link(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "data", {"x": np.ones((40, 4), np.float32)})
    found = records_of(
        train(tmp_path, num_ranks=1, run={"directory": str(tmp_path / "run"), "steps": 140}), "scaling"
    )
    assert "give its rate by scaling.link" in found[-1]["text"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "data").symlink_to(tmp_path / "data")
    directory = train(other, num_ranks=1, sample_s=0.005, scaling={"link": "100gbit", "goal": "time"})
    (*_, last) = records_of(directory, "scaling")
    assert last["missing"] == ""
    assert [one["nodes"] for one in last["predictions"]] == [1, 2, 3, 4]
    # Twelve samples of 5 ms: computing is divided among the nodes. To move would take longer than the steps that are
    # left, but another run should begin there.
    advice = read_run(directory).advice
    assert advice is not None
    assert advice.advised == 4
    assert advice.text.startswith("4 nodes instead of 1 would finish in ")


# ---------------------------------------------------------------------- asking for other nodes


def advice(advised: int, *, nodes: int = 2) -> NodesAdvice:
    return NodesAdvice(text=f"{advised} it is", nodes=nodes, advised=advised, goal=ScalingGoal.TIME)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(wish: Path, clock: Clock, **changes: Any) -> tuple[NodesRequest, StopRequest]:
    stop = StopRequest()
    values: dict[str, Any] = {"after_s": 60.0, "left": frozenset({8}), "stop": stop, "clock": clock}
    return NodesRequest(wish, **(values | changes)), stop


def test_a_run_asks_at_a_save_when_the_advice_has_stayed_the_same(tmp_path: Path) -> None:
    clock = Clock()
    asks, stop = request(tmp_path / "wish", clock)
    clock.now = 100.0
    for number in (4, 4):
        asks.consider(advice(number))
        assert asks.at_save(10) is None
    asks.consider(advice(3))
    asks.consider(advice(4))
    asks.consider(advice(4))
    assert asks.at_save(11) is None
    assert not stop.requested
    asks.consider(advice(4))
    asked = asks.at_save(12)
    assert asked is not None
    assert (asked["kind"], asked["step"], asked["nodes"], asked["to_nodes"]) == ("resize", 12, 2, 4)
    assert asked["reason"] == "4 it is"
    assert (tmp_path / "wish").read_text() == "4\n4 it is\n"
    assert stop.signal_name == "scaling: 4 instead of 2 nodes"
    assert asks.at_save(13) is None  # once


def test_a_run_does_not_ask_too_early_nor_to_stay_nor_for_nodes_that_it_has_left(tmp_path: Path) -> None:
    clock = Clock()
    asks, stop = request(tmp_path / "wish", clock)
    for _ in range(3):
        asks.consider(advice(4))
    clock.now = 59.0
    assert asks.at_save(1) is None
    clock.now = 61.0
    for number in (2, 8):
        for _ in range(5):
            asks.consider(advice(number))
        assert asks.at_save(2) is None
    for _ in range(3):
        asks.consider(advice(4))
    stop.request("SIGTERM")
    assert asks.at_save(3) is None  # it stops anyway
    assert not (tmp_path / "wish").exists()


def recipe(**scaling: Any) -> Recipe:
    return parse_recipe({
        "run": {"directory": "run", "steps": 10}, "task": {"target": "a:B"},
        "data": {"train": "data", "global_batch": 12}, "scaling": scaling,
    })  # fmt: skip


def test_a_run_asks_only_if_it_may_and_if_somebody_listens(tmp_path: Path) -> None:
    stop, listens = StopRequest(), {WISH_VARIABLE: str(tmp_path / "wish")}
    acts = recipe(act=True, max_nodes=4)
    assert open_request(recipe(), starts=[], stop=stop, environ=listens) == (None, "")
    found, note = open_request(acts, starts=[], stop=stop, environ={})
    assert found is None
    assert "scaling.act = true has no effect" in note
    found, note = open_request(acts, starts=[start(nodes=2)], stop=stop, environ=listens)
    assert found is not None
    assert note == ""
    resized = {**start(nodes=4), "before": {"stopped": "scaling"}}
    found, note = open_request(acts, starts=[start(nodes=2), resized], stop=stop, environ=listens)
    assert found is not None
    assert found._left == {2}
    again = {**start(nodes=2), "before": {"stopped": "scaling"}}
    found, note = open_request(acts, starts=[start(nodes=2), again], stop=stop, environ=listens)
    assert found is None
    assert "has asked for other nodes before, and has got 2 again" in note


def test_a_recipe_that_may_act_needs_a_limit_and_no_fixed_number_of_ranks() -> None:
    with pytest.raises(ValidationError, match="act = true needs max_nodes"):
        ScalingSection(act=True)
    with pytest.raises(ValidationError, match="min_nodes = 3 is above max_nodes = 2"):
        ScalingSection(min_nodes=3, max_nodes=2)
    with pytest.raises(ValidationError, match="is not a link rate"):
        ScalingSection(link="fast")
    recipe: dict[str, Any] = {
        "run": {"directory": "run", "steps": 10}, "task": {"target": "a:B"},
        "data": {"train": "data", "global_batch": 12}, "scaling": {"act": True, "max_nodes": 4},
    }  # fmt: skip
    with pytest.raises(Exception, match=r"run\.ranks = 2 forbids it"):
        parse_recipe(recipe | {"run": {"directory": "run", "steps": 10, "ranks": 2}})
    elastic = {"nodes": 4, "launcher": "supervise", "elastic": "2:4"}
    with pytest.raises(Exception, match=r"cannot be combined with slurm\.elastic = '2:4'"):
        parse_recipe(recipe | {"slurm": elastic})


def test_a_run_that_asks_stops_with_its_state_saved_and_its_reason_in_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many steps that what a move takes does not count: the age of this process is part of it.
    pack_arrays(tmp_path / "data", {"x": np.ones((40, 4), np.float32)})
    monkeypatch.setenv(WISH_VARIABLE, str(tmp_path / "wish"))
    acts = {
        "act": True,
        "max_nodes": 4,
        "act_after_minutes": 0.0,
        "link": "100gbit",
        "goal": "time",
        "least_gain_percent": 0.0,
    }
    with pytest.raises(StoppedEarly, match=r"\(scaling: 4 instead of 1 nodes\); the state is saved"):
        train(
            tmp_path, num_ranks=1, sample_s=0.01, scaling=acts, checkpoint={"every_steps": 30}, stop=StopRequest(),
            run={"directory": str(tmp_path / "run"), "steps": 50_000},
        )  # fmt: skip
    directory = tmp_path / "run"
    number, reason = (tmp_path / "wish").read_text().splitlines()
    assert number == "4"
    (asked,) = records_of(directory, "resize")
    assert asked["reason"] == reason
    assert (asked["nodes"], asked["to_nodes"]) == (1, 4)
    (stopped,) = records_of(directory, "stopped")
    assert stopped["reason"] == "scaling: 4 instead of 1 nodes"
    assert reason.startswith("4 nodes instead of 1 would finish in ")
    last = max(newest(directory, "step"))
    assert last == asked["step"] + 1
    assert max(newest(directory, "checkpoint")) == last
    assert summary_of(directory)["status"] == "stopped"


# ---------------------------------------------------------------------- the thread


def test_advice_is_computed_on_a_thread_at_most_once_in_the_given_time() -> None:
    clock = Clock()
    evidence = RunEvidence([start()])
    advisor = NodesAdvisor(
        evidence,
        goal=ScalingGoal.BALANCE,
        least_gain=0.0,
        num_ranks=4,
        num_nodes=2,
        every_s=30.0,
        clock=clock,
    )
    try:
        for record in usual():
            advisor.receive(record)
        assert advisor.take() == []  # the buckets came after the last window
        advisor.receive(window(steps=10))
        first = wait_for_record(advisor)
        assert first["nodes"] == 2
        clock.now = 29.0
        advisor.receive(window(steps=10))
        time.sleep(0.1)
        assert advisor.take() == []
        clock.now = 30.0
        advisor.receive(window(steps=10))
        assert wait_for_record(advisor)["kind"] == "scaling"
        assert {thread.name for thread in threading.enumerate()} >= {"hpctrain-advice"}
    finally:
        advisor.close()


def wait_for_record(advisor: NodesAdvisor) -> dict[str, Any]:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if found := advisor.take():
            (record,) = found
            return record
        time.sleep(0.01)
    raise AssertionError("no advice")


def test_what_the_model_cannot_predict_is_said_once_it_is_known() -> None:
    split = start(recipe={"parallel": {"pipeline": 2}})
    advisor = NodesAdvisor(
        RunEvidence([split]), goal=ScalingGoal.TIME, least_gain=0.0, num_ranks=4, num_nodes=2, every_s=0.0
    )
    try:
        for record in [*(step(n, time=101.0 + n) for n in range(1, 5)), BUCKETS, window(steps=20)]:
            advisor.receive(record)
        found = wait_for_record(advisor)
    finally:
        advisor.close()
    assert found["text"].startswith(
        "no advice on the number of nodes: the model has no formula for parallel.pipeline"
    )
    assert found["predictions"] == []
