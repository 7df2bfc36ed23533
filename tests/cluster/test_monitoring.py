"""Prometheus on the cluster's head watches a job of two nodes, through the file that the job writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.errors import ExitCode
from hpctrain.monitoring import write_monitoring
from tests.cluster import Cluster
from tests.cluster.training_jobs import running
from tests.monitoring.panels import EMPTY_ON_CPUS, expressions, wait_for_data
from tests.monitoring.servers import configure, program, prometheus_argv
from tests.states import wait_for

pytestmark = pytest.mark.launches

ADDRESS = "127.0.0.1:9090"  # the head has a loopback of its own
RECIPE = """
[run]
name = "job"
directory = "run"
steps = 1000000
[task]
target = "tests.straggler_tasks:Steps"
options = { sleep_s = 0.03, parameters = 100000 }
[data]
train = "data"
held_out = "data"
global_batch = 4
[checkpoint]
every_steps = 100
[stop]
after_s = 3600
[stragglers]
window_s = 1
[telemetry]
evaluate_every_steps = 100
prometheus = "endpoint"
prometheus_address = "0.0.0.0"
prometheus_targets = "targets"
"""


def test_the_nodes_of_a_job_are_scraped_by_the_names_in_its_file(cluster: Cluster, tmp_path: Path) -> None:
    promtool, job, watch = program("promtool"), tmp_path / "job", tmp_path / "watch"
    targets = job / "targets"
    for folder in (job, watch, targets):
        folder.mkdir()
    write_monitoring(watch)
    pack_arrays(job / "data", {"x": np.ones((256, 4), np.float32)})
    (job / "recipe.toml").write_text(RECIPE)

    def ask(expression: str) -> list[dict[str, Any]]:
        words = [promtool, "query", "--format=json", "instant", f"http://{ADDRESS}", expression]
        done = cluster.run(words, timeout_s=300, cwd=watch)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    server = prometheus_argv(configure(watch, targets=targets), data=watch / "data", address=ADDRESS)
    train = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--job-name=watched",
        "--wait=30",
        "hpctrain",
        "train",
    ]
    # Nothing is slow and nothing fails, so there are no alerts to be named.
    asked = [
        expression
        for expression in expressions(run="job")
        if not expression.startswith("ALERTS") and not any(name in expression for name in EMPTY_ON_CPUS)
    ]
    with (
        running(cluster, server, watch, {}) as prometheus,
        running(cluster, [*train, "recipe.toml"], job, {}) as ranks,
    ):
        try:
            wait_for(lambda: list(targets.glob("*.json")), timeout_s=300)
            wait_for_data(asked, ask)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{ranks.output[-3000:]}\n{prometheus.output[-3000:]}") from None
        up = ask('up{run="job"} == 1')
        assert {one["metric"]["instance"].split(":")[0] for one in up} == set(cluster.node_names[:2])
        sent = ask('hpctrain_sent_bytes_total{run="job"}')
        assert {one["metric"]["rank"] for one in sent} == {"0", "1"}
        assert all(float(one["value"][1]) > 0 for one in sent)

        stopped = cluster.run(["scancel", "--signal=USR1", "--name=watched"], timeout_s=300)
        assert stopped.returncode == 0, stopped.stderr
        assert ranks.wait(timeout_s=300) == ExitCode.STOPPED_EARLY, ranks.output
        # It has taken its endpoints off the list.
        assert not list(targets.glob("*.json"))
        wait_for(lambda: not ask('up{run="job"}'), timeout_s=300)
