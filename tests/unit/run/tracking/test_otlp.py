"""What a run sends over OTLP, decoded with OpenTelemetry's own types; and collectors that do not take it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import RecipeError
from hpctrain.run import metrics_out as open_sinks
from hpctrain.telemetry import METRICS, MetricType
from tests.run_files import newest
from tests.unit.run.tracking.collector import Collector
from tests.unit.run.training_cases import Task, run

service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@pytest.fixture
def collectors() -> Iterator[list[Collector]]:
    opened: list[Collector] = []
    yield opened
    for collector in opened:
        collector.close()


def decoded(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of the process, and its metrics by name."""
    request = service.ExportMetricsServiceRequest.FromString(body)
    (resource,) = request.resource_metrics
    attributes = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    return attributes, {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def value_of(metric: Any, **labels: str) -> float:
    kind = metric.WhichOneof("data")
    (point,) = [
        point
        for point in getattr(metric, kind).data_points
        if labels.items() <= {entry.key: entry.value.string_value for entry in point.attributes}.items()
    ]
    return point.as_double


def test_a_collector_gets_names_units_and_values(where: Path, collectors: list[Collector]) -> None:
    collectors.append(collector := Collector())
    run(where, Task(), telemetry={"otlp_endpoint": collector.url}, checkpoint={"every_steps": 5})
    assert set(collector.paths) == {"/v1/metrics"}
    attributes, metrics = decoded(collector.bodies[-1])  # of the last export, at the end
    assert attributes["service.name"] == "hpctrain"
    assert attributes["hpctrain.run"] == "run"
    assert attributes["host.name"] == socket.gethostname()
    steps = newest(where / "run", "step")
    assert value_of(metrics["hpctrain_steps"]) == 10
    assert value_of(metrics["hpctrain_step"]) == 10
    assert value_of(metrics["hpctrain_loss"]) == steps[10]["loss"]
    assert value_of(metrics["hpctrain_samples"]) == steps[10]["global_samples"]
    assert value_of(metrics["hpctrain_step_part_seconds"], part="input", rank="0") == pytest.approx(
        sum(record["seconds"]["input"] for record in steps.values())
    )
    assert value_of(metrics["hpctrain_checkpoints_committed"]) == 2
    (histogram,) = metrics["hpctrain_step_seconds"].histogram.data_points
    assert (histogram.count, sum(histogram.bucket_counts)) == (10, 10)
    assert histogram.sum == pytest.approx(sum(record["seconds"]["step"] for record in steps.values()))
    assert tuple(histogram.explicit_bounds) == METRICS["hpctrain_step_seconds"].buckets
    assert not histogram.HasField("min")
    units = {"seconds": "s", "bytes": "By", "joules": "J", "ratio": "1", "": ""}
    known = {name.removesuffix("_total"): metric for name, metric in METRICS.items()}
    for name, metric in metrics.items():
        assert metric.unit == units[known[name].unit]
        assert metric.description == known[name].help
        kind = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}[known[name].type.value]
        assert metric.WhichOneof("data") == kind
        if known[name].type is MetricType.COUNTER:
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == 2  # cumulative


def test_exports_come_while_it_trains(where: Path, collectors: list[Collector]) -> None:
    collectors.append(collector := Collector())

    class Waiting(Task):
        def loss(self, model: Any, fields: Any) -> Any:
            deadline = time.monotonic() + 300
            while self.steps == 3 and len(collector.bodies) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().loss(model, fields)

    run(where, Waiting(), telemetry={"otlp_endpoint": collector.url, "otlp_every_s": 0.05})
    counts = [value_of(decoded(body)[1]["hpctrain_steps"]) for body in collector.bodies]
    assert counts == sorted(counts)
    assert 3 in counts
    assert counts[-1] == 10


@pytest.mark.parametrize("fault", ["down", "refuses", "hangs"])
def test_a_collector_that_does_not_take_them_costs_one_warning(
    where: Path, collectors: list[Collector], capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    url = "http://127.0.0.1:9"
    if fault != "down":
        collectors.append(collector := Collector(status=403, hangs=fault == "hangs"))
        url = collector.url
    began = time.monotonic()
    summary = run(where, Task(), telemetry={"otlp_endpoint": url, "otlp_every_s": 0.05})
    assert summary["status"] == "finished"
    assert len(newest(where / "run", "step")) == 10
    assert time.monotonic() - began < 240
    warnings = capfd.readouterr().err
    if fault != "hangs":  # then the run may be over before the first request is given up
        assert warnings.count("does not take the run's metrics") == 1, warnings
    assert "Traceback" not in warnings
    assert len(warnings.splitlines()) <= 1


def test_keys_come_from_opentelemetrys_variables(
    where: Path, collectors: list[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    collectors.append(collector := Collector())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20key")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    run(where, Task(), telemetry={"otlp_endpoint": f"{collector.url}/"})
    attributes, _ = decoded(collector.bodies[-1])
    assert attributes["deployment.environment"] == "test"
    assert collector.headers[-1]["api-key"] == "a key"
    assert "a key" not in (where / "run/recipe.toml").read_text()


@pytest.mark.parametrize(
    ("key", "value", "extra"),
    [("otlp_endpoint", "http://127.0.0.1:4318", "otlp"), ("tensorboard", True, "tensorboard")],
)
def test_a_missing_package_is_said_before_training(
    where: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, extra: str
) -> None:
    monkeypatch.setattr(open_sinks, "_is_installed", lambda package: False)
    with pytest.raises(RecipeError, match=rf"telemetry\.{key} .*hpctrain\[{extra}\]"):
        run(where, Task(), telemetry={key: value})
    assert not (where / "run/metrics").exists()
