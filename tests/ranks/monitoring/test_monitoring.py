"""Prometheus and Alertmanager watch a real run of two ranks, of which one is slow and then both are killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hpctrain.data import pack_arrays
from hpctrain.monitoring import write_monitoring
from tests.monitoring.panels import EMPTY_ON_CPUS, expressions, wait_for_data
from tests.monitoring.servers import Server, alertmanager, configure, prometheus
from tests.ranks_launcher import start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches

RECIPE = """
[run]
name = "watched"
directory = "run"
steps = 1000000
[task]
target = "tests.straggler_tasks:SlowForAWhile"
options = { sleep_s = 0.01, until = 1000000 }
[data]
train = "data"
held_out = "data"
global_batch = 4
[checkpoint]
every_steps = 100
[stop]
after_s = 3600
[stragglers]
window_s = 0.3
[telemetry]
evaluate_every_steps = 100
prometheus = "endpoint"
prometheus_targets = "targets"
"""


def quick_rules(exported: Path, *alerts: str) -> Path:
    """The exported rules, but that these alerts fire after a second instead of minutes."""
    rules = yaml.safe_load((exported / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] in alerts:
            rule["for"] = "1s"
    path = exported / "quick.yml"
    path.write_text(yaml.safe_dump(rules))
    return path


def slowest(own_times: list[dict[str, Any]]) -> str | None:
    """The rank whose time is more than twice the other one's; None if there is none, or a rank has no rate yet."""
    if len(own_times) < 2:
        return None
    less, more = sorted(own_times, key=lambda one: float(one["value"][1]))
    found: str = more["metric"]["rank"]
    return found if float(more["value"][1]) > 2 * float(less["value"][1]) else None


def next_alert(server: Server, name: str) -> Any:
    """Waits for an alert at Alertmanager, and returns it."""
    found = wait_for(lambda: server.get("/api/v2/alerts", filter=f"alertname={name}"), timeout_s=300)
    return found[0]


def test_every_panel_has_data_and_alerts_arrive_with_their_runbooks(tmp_path: Path) -> None:
    exported, targets = tmp_path / "monitoring", tmp_path / "targets"
    targets.mkdir()
    write_monitoring(exported)
    pack_arrays(tmp_path / "data", {"x": np.ones((256, 4), np.float32)})
    (tmp_path / "recipe.toml").write_text(RECIPE)
    hpctrain = str(Path(sys.executable).with_name("hpctrain"))
    rules = quick_rules(exported, "HpctrainSlow", "HpctrainEndpointGone")
    with alertmanager(tmp_path) as alerts:
        settings = configure(exported, targets=targets, alertmanager=alerts.address, rules=rules)
        with (
            prometheus(settings, folder=tmp_path) as server,
            # Two nodes, so that each rank has an endpoint.
            start_command(
                2, [hpctrain, "train", "recipe.toml"], cwd=tmp_path, env={"HPCTRAIN_RANKS_PER_NODE": "1"}
            ) as launched,
        ):
            asked = expressions(run="watched")
            on_gpus = [
                expression for expression in asked if any(name in expression for name in EMPTY_ON_CPUS)
            ]
            assert len(on_gpus) == 1
            try:
                slow = next_alert(alerts, "HpctrainSlow")
                wait_for_data([expression for expression in asked if expression not in on_gpus], server.query)
            except AssertionError as error:
                raise AssertionError(
                    f"{error}\n{launched.stdout[-3000:]}\n{launched.stderr[-3000:]}"
                ) from None
            assert server.query(on_gpus[0]) == []
            assert len(server.query('up{run="watched"} == 1')) == 2
            ranks = server.query('count by (rank) (hpctrain_step_seconds_count{run="watched"})')
            assert {one["metric"]["rank"] for one in ranks} == {"0", "1"}
            own = next(text for text in asked if "compute|hidden_sync|input|other" in text)
            wait_for(lambda: slowest(server.query(own)) == "1")

            # Killed, not ended: nobody takes the endpoints off the list.
            for pid in launched.rank_processes().values():
                os.kill(pid, signal.SIGKILL)
            gone = next_alert(alerts, "HpctrainEndpointGone")
    assert (slow["labels"]["run"], slow["labels"]["cause"], slow["labels"]["severity"]) == (
        "watched",
        "compute",
        "ticket",
    )
    assert slow["annotations"]["summary"].startswith(
        "Run watched: 1 of its ranks, nodes or links is slow (compute)"
    )
    assert slow["annotations"]["runbook"] == "docs/runbooks/f2-slow-rank.md"
    (listed,) = yaml.safe_load(next(targets.glob("*.json")).read_text())
    assert gone["labels"]["instance"] in listed["targets"]
    assert gone["annotations"]["runbook"] == "docs/runbooks/f3-hang-or-lost-rank.md"
