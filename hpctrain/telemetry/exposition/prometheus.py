"""Exposes metrics to Prometheus: over an HTTP endpoint for Prometheus, or in a text file for node exporter."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from hpctrain.storage import replace_file
from hpctrain.telemetry.exposition.catalogue import Metric, MetricType
from hpctrain.telemetry.exposition.run_metrics import RunMetrics, Series
from hpctrain.telemetry.records import write_json

_CLOSING_MAY_TAKE_S = 5.0


def missing_prometheus_client() -> str | None:
    """Returns what to install if the package prometheus-client is missing, else None."""
    if importlib.util.find_spec("prometheus_client") is not None:
        return None
    return "needs prometheus-client, which is not installed: pip install 'hpctrain[metrics]'"


@final
class PrometheusEndpoint:
    """A sink that exposes `metrics` at `http://address:port/metrics`, from its own threads.

    port: 0 chooses a free port. Raises OSError if the port is in use, or if `address` is not an address of this
    machine.
    """

    name = "Prometheus endpoint"

    def __init__(self, metrics: RunMetrics, *, address: str, port: int) -> None:
        from prometheus_client import start_http_server

        self._metrics = metrics
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=_registry(metrics))
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{address}:{port}") from error
        self.port = int(self._server.server_port)

    def receive(self, record: Mapping[str, Any]) -> None:
        self._metrics.receive(record)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSING_MAY_TAKE_S)


@final
class PrometheusTextFile:
    """A sink that replaces the file `path` with all metrics every `every_s` seconds, on its own thread.

    Every series has the labels `labels`, so that node exporter can merge the files of several runs. The file is removed
    at the end, since node exporter would otherwise show the values of a dead run for ever. Raises OSError if the file
    cannot be written.
    """

    name = "Prometheus text file"

    def __init__(self, metrics: RunMetrics, path: Path, *, every_s: float, labels: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._every_s = every_s
        self._registry = _registry(metrics, labels=labels)
        self._error: OSError | None = None
        self._ended = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, name="hpctrain-text-file", daemon=True)
        self._thread.start()

    def receive(self, record: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._metrics.receive(record)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_CLOSING_MAY_TAKE_S)
        self._partial.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _keep_writing(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._write()
            except OSError as error:
                self._error = error
                return

    def _write(self) -> None:
        from prometheus_client import generate_latest

        try:
            replace_file(self._path, generate_latest(self._registry), partial=self._partial)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _registry(metrics: RunMetrics, *, labels: Mapping[str, str] | None = None) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    collector: Any = _Collector(metrics, labels=labels or {})  # its base class is in the package
    registry.register(collector)
    return registry


class _Collector:
    """Gives prometheus_client the metrics. `labels` are added to every series."""

    def __init__(self, metrics: RunMetrics, *, labels: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._labels = dict(labels)

    def collect(self) -> Iterator[Any]:
        for metric, series in self._metrics.snapshot():
            # The run's information has these labels of its own.
            more = {name: value for name, value in self._labels.items() if name not in metric.labels}
            yield _family(metric, series, labels=more)


def _family(metric: Metric, series: Sequence[Series], *, labels: Mapping[str, str]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names, values = [*metric.all_labels, *labels], list(labels.values())
    if metric.type is MetricType.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for one in series:
            buckets = list(zip(bounds, accumulate(one.counts), strict=True))
            histogram.add_metric([*one.labels, *values], buckets=buckets, sum_value=one.value)
        return histogram
    kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=names)
    for one in series:
        family.add_metric([*one.labels, *values], one.value)
    return family


# The file in which Prometheus finds where a run's endpoints are (`file_sd_configs`).


@final
class TargetsFile:
    """A sink that ignores all records, and keeps a file of targets for Prometheus while the run lasts.

    Only rank 0 needs this sink. targets: `host:port` of each endpoint. labels: the labels of every target. Raises
    OSError if the file cannot be written.
    """

    name = "file with Prometheus' targets"

    def __init__(self, path: Path, *, targets: Sequence[str], labels: Mapping[str, str]) -> None:
        self._path = path
        write_json(path, [{"targets": list(targets), "labels": dict(labels)}])

    def receive(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
