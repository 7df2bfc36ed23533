"""A sink that sends a run's metrics to an OpenTelemetry collector, over OTLP/HTTP."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, final

from hpctrain.telemetry.exposition.catalogue import Metric, MetricType
from hpctrain.telemetry.exposition.run_metrics import RunMetrics, Series

_REQUEST_S = 4.0
# The unit of a ratio is "1", by which Prometheus' names get `_ratio`; a count has none.
_UNITS = {"seconds": "s", "bytes": "By", "joules": "J", "ratio": "1", "": ""}


@final
class OtlpSink:
    """Sends all metrics of this process to `endpoint` every `every_s` seconds, on its own thread.

    endpoint: a URL such as `http://127.0.0.1:4318`, without `/v1/metrics`. OTEL_EXPORTER_OTLP_HEADERS and the other
    environment variables of OpenTelemetry's exporter apply, so that secret keys need not be in a recipe. resource:
    attributes of this process.

    If the collector does not accept the metrics, one warning is printed. No count is lost until the collector accepts
    metrics again, since counters are sums since the start of the process. Raises ImportError if OpenTelemetry's
    packages are not installed.
    """

    name = "OpenTelemetry export"

    def __init__(
        self,
        metrics: RunMetrics,
        *,
        endpoint: str,
        every_s: float,
        resource: Mapping[str, str],
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.resources import Resource

        self._metrics = metrics
        self._endpoint = endpoint
        self._every_s = every_s
        self._warned = False
        self._resource = Resource.create(dict(resource))
        # It logs each attempt that fails; here there is one warning.
        self._log = _Log()
        logger = logging.getLogger(metric_exporter.__name__)
        logger.addHandler(self._log)
        logger.propagate = False
        self._exporter = metric_exporter.OTLPMetricExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/metrics", timeout=_REQUEST_S
        )
        self._success = MetricExportResult.SUCCESS
        self._started_ns = time.time_ns()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_until_closed, name="hpctrain-otlp", daemon=True)
        self._thread.start()

    def receive(self, record: Mapping[str, Any]) -> None:
        self._metrics.receive(record)

    def close(self) -> None:
        """Sends the metrics a last time, in at most 5 s."""
        self._closed.set()
        self._thread.join(_REQUEST_S + 1)
        self._exporter.shutdown()

    def _send_until_closed(self) -> None:
        while not self._closed.wait(self._every_s):
            self._send()
        self._send()

    def _send(self) -> None:
        self._log.text = ""
        try:
            data = metrics_data(self._metrics, resource=self._resource, started_ns=self._started_ns)
            sent = self._exporter.export(data) is self._success
        except Exception as error:  # whatever the exporter's libraries raise
            sent = False
            self._log.text = self._log.text or str(error)
        if not sent and not self._warned:
            self._warned = True
            text = (
                f"hpctrain: {self._endpoint} does not take the run's metrics: {self._log.text}; training goes on, and "
                f"they are sent again every {self._every_s:g} s"
            )
            print(text, file=sys.stderr, flush=True)


class _Log(logging.Handler):
    """Keeps the first log message since `text` was cleared."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage().rstrip(".")


def metrics_data(metrics: RunMetrics, *, resource: Any, started_ns: int) -> Any:
    """Returns the metrics that have values as OpenTelemetry's `MetricsData`.

    The names are those of the catalogue, without the ending `_total`, which Prometheus appends again. resource:
    OpenTelemetry's `Resource`.
    """
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    now_ns = time.time_ns()
    found = [
        export.Metric(
            name=metric.name.removesuffix("_total"),
            description=metric.help,
            unit=_UNITS[metric.unit],
            data=_data(metric, series, started_ns=started_ns, now_ns=now_ns),
        )
        for metric, series in metrics.snapshot()
    ]
    scope = export.ScopeMetrics(scope=InstrumentationScope("hpctrain"), metrics=found, schema_url="")
    return export.MetricsData(
        resource_metrics=[
            export.ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url=resource.schema_url)
        ]
    )


def _data(metric: Metric, series: list[Series], *, started_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export

    def attributes(each: Series) -> dict[str, str]:
        return dict(zip(metric.all_labels, each.labels, strict=True))

    unknown: Any = None  # this field is left out
    if metric.type is MetricType.HISTOGRAM:
        return export.Histogram(
            data_points=[
                export.HistogramDataPoint(
                    attributes=attributes(each), start_time_unix_nano=started_ns, time_unix_nano=now_ns,
                    count=sum(each.counts), sum=each.value, bucket_counts=each.counts, explicit_bounds=metric.buckets,
                    min=unknown, max=unknown,
                )
                for each in series
            ],
            aggregation_temporality=export.AggregationTemporality.CUMULATIVE,
        )  # fmt: skip
    points = [
        export.NumberDataPoint(
            attributes=attributes(each), start_time_unix_nano=started_ns, time_unix_nano=now_ns,
            value=float(each.value),
        )
        for each in series
    ]  # fmt: skip
    if metric.type is MetricType.COUNTER:
        return export.Sum(
            data_points=points, aggregation_temporality=export.AggregationTemporality.CUMULATIVE, is_monotonic=True
        )  # fmt: skip
    return export.Gauge(data_points=points)
