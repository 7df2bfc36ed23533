"""Real ranks write for TensorBoard and send to an OpenTelemetry collector, which goes away while they train."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks_launcher import run_command, start_command
from tests.run_files import losses_of
from tests.unit.run.tracking.collector import Collector

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
RECIPE = """
[run]
directory = "run"
steps = 120
[task]
target = "tests.faults.faulty_tasks:Slow"
[data]
train = "data/train"
held_out = "data/test"
global_batch = 64
[telemetry]
tensorboard = true
otlp_every_s = 0.2
evaluate_every_steps = 40
"""


def instance_of(body: bytes) -> str:
    (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    attributes = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    return attributes["service.instance.id"].partition("/")[2]


def metrics_of(body: bytes) -> dict[str, Any]:
    (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def test_each_node_sends_and_training_goes_on_without_the_collector(tmp_path: Path) -> None:
    packed = run_command(None, [HPCTRAIN, "data", "pack", "digits", "data"], cwd=tmp_path, timeout_s=300)
    assert packed.returncode == 0, packed.stderr
    (tmp_path / "recipe.toml").write_text(RECIPE)
    collector = Collector()
    sets = ["--set", f"telemetry.otlp_endpoint={collector.url}"]
    command = [HPCTRAIN, "launch", "-n", "2", "--", "hpctrain", "train", "recipe.toml", *sets]
    try:
        with start_command(None, command, env={"HPCTRAIN_RANKS_PER_NODE": "1"}, cwd=tmp_path) as launched:
            while launched.process.poll() is None and len(set(map(instance_of, list(collector.bodies)))) < 2:
                time.sleep(0.05)
            collector.close()
            ended = launched.wait(timeout_s=300)
    finally:
        collector.close()
    assert ended.returncode == 0, ended.stderr
    of_rank = {instance_of(body): metrics_of(body) for body in collector.bodies}
    assert "hpctrain_run_info" in of_rank["0"]  # only rank 0 speaks for the run
    assert "hpctrain_run_info" not in of_rank["1"]
    assert "hpctrain_step_seconds" in of_rank["1"]
    # One line of each rank that sends, however often it fails.
    assert 1 <= ended.stderr.count("does not take the run's metrics") <= 2, ended.stderr

    losses = losses_of(tmp_path / "run")
    assert sorted(losses) == list(range(1, 121))
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(losses, rel=1e-6)
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1  # rank 0's
