"""Computes the values of a run's metrics from its records. Sinks pass them on to monitoring systems."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from hpctrain.telemetry.exposition.catalogue import (
    CATALOGUE,
    METRICS,
    Metric,
    MetricType,
    Scope,
)
from hpctrain.telemetry.step_clock import PART_KEYS

# Returns a value at the moment of the request, on the requesting thread; None: there is no value now.
Probe = Callable[[], float | None]
# Name, label values (without the rank), value.
Value = tuple[str, tuple[str, ...], float]

# Counters that are 0 from the beginning, so that their first increase is seen.
_KNOWN_LABELS: dict[str, tuple[str, ...]] = {
    "hpctrain_step_part_seconds_total": PART_KEYS,
    "hpctrain_stops_total": ("signal", "time_limit", "scaling"),
    "hpctrain_slow": ("input", "compute", "other", "checkpoint", "network"),
}


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a metric.

    Attributes:
        labels: The label values of the series, in the order of `Metric.all_labels`.
        value: The value; for a histogram, the sum of the observations.
        counts: For a histogram, the number of observations in each bucket; the last bucket is above all bounds.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def mean(self) -> float:
        return self.total / max(1, sum(self.counts))


@final
class RunMetrics:
    """The values of the metrics that this process exposes. `receive` and `snapshot` may be called on different threads.

    Args:
        rank: The rank of this process; metrics of the whole run are exposed on rank 0 only.
        given: Values that are known before training.
        probes: For each metric whose value is computed only on request: its name, and a function that returns the
            value.
    """

    def __init__(
        self, *, rank: int, given: Iterable[Value] = (), probes: Mapping[str, Probe] | None = None
    ) -> None:
        self._rank = rank
        self._exposed = [metric for metric in CATALOGUE if metric.scope is Scope.RANK or rank == 0]
        self._lock = threading.Lock()
        self._probes = dict(probes or {})
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        self._histograms = {
            name: _Histogram(metric.buckets, [0] * (len(metric.buckets) + 1))
            for name, metric in METRICS.items()
            if metric.type is MetricType.HISTOGRAM
        }
        for name, metric in METRICS.items():
            if name in _KNOWN_LABELS:
                self._values[name] = {(label,): 0.0 for label in _KNOWN_LABELS[name]}
            elif metric.type is MetricType.COUNTER and not metric.labels and name not in _ABSENT_AT_FIRST:
                self._values[name] = {(): 0.0}
        for name, labels, value in given:
            self._values[name][labels] = value
        self._samples = 0  # of the run, after the last step
        self._slow: set[tuple[Any, ...]] = set()
        self._handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "begins": self._begins,
            "step": self._step,
            "buckets": self._buckets,
            "efficiency": self._efficiency,
            "evaluation": self._evaluation,
            "checkpoint": self._checkpoint,
            "checkpoint_begun": lambda record: self._add("hpctrain_checkpoints_attempted_total"),
            "checkpoint_failed": lambda record: self._add("hpctrain_checkpoints_failed_total"),
            "checkpoint_skipped": lambda record: self._add("hpctrain_checkpoints_skipped_total"),
            "checkpoint_verified": self._checkpoint_verified,
            "loss_jump": lambda record: self._add("hpctrain_loss_jumps_total"),
            "roll_back": self._roll_back,
            "out_of_memory": self._out_of_memory,
            "damage": lambda record: self._add("hpctrain_damaged_blocks_total"),
            "data_balance": self._data_balance,
            "slow": lambda record: self._slow_changed(record, is_slow=True),
            "slow_ended": lambda record: self._slow_changed(record, is_slow=False),
            "stopped": self._stopped,
            "energy": self._energy,
            "scaling": self._scaling,
        }

    def receive(self, record: Mapping[str, Any]) -> None:
        """Updates the values from a record. Records of kinds without metrics are ignored."""
        handler = self._handlers.get(record["kind"])
        if handler is not None:
            with self._lock:
                handler(record)

    def snapshot(self) -> list[tuple[Metric, list[Series]]]:
        """Returns the metrics of this process that have values, in the order of the catalogue."""
        probed = {name: probe() for name, probe in self._probes.items()}
        found = []
        with self._lock:
            for metric in self._exposed:
                rank = (str(self._rank),) if metric.scope is Scope.RANK else ()
                if metric.type is MetricType.HISTOGRAM:
                    histogram = self._histograms[metric.name]
                    series = [Series(rank, histogram.total, tuple(histogram.counts))]
                elif metric.name in probed:
                    value = probed[metric.name]
                    series = [] if value is None else [Series(rank, value)]
                else:
                    values = self._values[metric.name]
                    series = [Series((*rank, *labels), value) for labels, value in values.items()]
                if series:
                    found.append((metric, series))
        return found

    # ------------------------------------------------------------------ one method a kind of record

    def _begins(self, record: Mapping[str, Any]) -> None:
        at = record["time"]
        began = self._values["hpctrain_start_time_seconds"].get(())
        if began is not None:
            self._set("hpctrain_startup_seconds", at - began)
        self._set("hpctrain_last_step_timestamp_seconds", at)
        self._set("hpctrain_last_checkpoint_timestamp_seconds", at)
        self._set("hpctrain_step", record["step"])
        self._set("hpctrain_target_steps", record["total_steps"])
        self._set("hpctrain_micro_batches", record["micro_batches"])
        self._samples = record["samples"]

    def _step(self, record: Mapping[str, Any]) -> None:
        seconds = record["seconds"]
        self._add("hpctrain_steps_total")
        self._add("hpctrain_skipped_steps_total", not record["applied"])
        self._add("hpctrain_samples_total", record["global_samples"] - self._samples)
        self._samples = record["global_samples"]
        self._add("hpctrain_skipped_samples_total", record["skipped_samples"])
        self._set("hpctrain_step", record["step"])
        self._set("hpctrain_epoch", record["epoch"])
        self._set("hpctrain_last_step_timestamp_seconds", record["time"])
        self._set("hpctrain_loss", record["loss"])
        self._set("hpctrain_gradient_norm", record["grad_norm"])
        self._set("hpctrain_learning_rate", record["lr"])
        self._set("hpctrain_loss_scale", record["loss_scale"])
        self._histograms["hpctrain_step_seconds"].observe(seconds["step"])
        parts = self._values["hpctrain_step_part_seconds_total"]
        # Labels that add up: `compute` does not include `hidden_sync`, as it does in the record.
        compute_s = max(0.0, seconds["compute"] - seconds.get("hidden_sync", 0.0))
        for part in PART_KEYS:
            parts[part,] += compute_s if part == "compute" else seconds.get(part, 0.0)
        self._add("hpctrain_sync_seconds_total", seconds.get("sync", 0.0))
        if "device_compute" in seconds:
            self._add("hpctrain_device_compute_seconds_total", seconds["device_compute"])

    def _buckets(self, record: Mapping[str, Any]) -> None:
        self._add("hpctrain_reduced_bytes_total", record["steps"] * sum(record["bytes"]))

    def _efficiency(self, record: Mapping[str, Any]) -> None:
        rank_steps = record["ranks"] * record["steps"]
        for part, seconds in record["parts"].items():
            self._add("hpctrain_ranks_part_seconds_total", seconds * rank_steps, part)
        for factor, value in record["factors"].items():
            self._set("hpctrain_efficiency_ratio", value, factor)

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        for metric, value in record["quality"].items():
            self._set("hpctrain_evaluation", value, metric)

    def _checkpoint(self, record: Mapping[str, Any]) -> None:
        self._add("hpctrain_checkpoints_committed_total")
        self._add("hpctrain_checkpoint_stall_seconds_total", record["stall_seconds"])
        self._add("hpctrain_checkpoint_bytes_total", record["bytes"])
        self._histograms["hpctrain_checkpoint_write_seconds"].observe(record["write_seconds"])
        self._set("hpctrain_last_checkpoint_timestamp_seconds", record["time"])
        self._set("hpctrain_last_checkpoint_step", record["step"])

    def _checkpoint_verified(self, record: Mapping[str, Any]) -> None:
        what = "verified" if record["good"] else "failed"
        self._add(f"hpctrain_checkpoints_{what}_total")

    def _roll_back(self, record: Mapping[str, Any]) -> None:
        lost = max(0, record["step"] - 1 - record["to_step"])
        self._add("hpctrain_roll_backs_total")
        self._add("hpctrain_lost_steps_total", lost)
        self._add("hpctrain_lost_seconds_total", lost * self._histograms["hpctrain_step_seconds"].mean)
        self._set("hpctrain_step", record["to_step"])
        self._samples = record["to_samples"]

    def _out_of_memory(self, record: Mapping[str, Any]) -> None:
        self._add("hpctrain_out_of_memory_total", "attempt" not in record)  # else of an earlier start
        self._set("hpctrain_micro_batches", record["micro_batches"])

    def _data_balance(self, record: Mapping[str, Any]) -> None:
        for of in ("samples", "bytes"):
            if record[of]["mean"] > 0:
                self._set("hpctrain_data_imbalance_ratio", record[of]["most"] / record[of]["mean"], of)

    def _slow_changed(self, record: Mapping[str, Any], *, is_slow: bool) -> None:
        key = (record["cause"], tuple(record["ranks"]), tuple(record["nodes"]))
        if is_slow:
            self._slow.add(key)
        else:
            self._slow.discard(key)
        self._set("hpctrain_slow", sum(slow[0] == key[0] for slow in self._slow), key[0])

    def _stopped(self, record: Mapping[str, Any]) -> None:
        self._add("hpctrain_stops_total", 1.0, stop_reason(record["reason"]))

    def _energy(self, record: Mapping[str, Any]) -> None:
        for source, joules in record["joules"].items():
            self._add("hpctrain_energy_joules_total", joules, source)
        for device in record["devices"]:
            gpu = str(device["index"])
            for metric, name in _OF_GPUS.items():
                if device[name] is not None:
                    self._set(metric, device[name], gpu)

    def _scaling(self, record: Mapping[str, Any]) -> None:
        by_nodes = {one["nodes"]: one for one in record["predictions"]}
        if record["nodes"] not in by_nodes:  # nothing can be said
            return
        now, advised = by_nodes[record["nodes"]], by_nodes[record["advised_nodes"]]
        self._set("hpctrain_advised_nodes", record["advised_nodes"])
        self._set("hpctrain_advised_time_ratio", advised["time_s"] / now["time_s"])
        self._set("hpctrain_advised_node_time_ratio", advised["node_hours"] / now["node_hours"])

    def _add(self, name: str, value: float = 1.0, *labels: str) -> None:
        values = self._values[name]
        values[labels] = values.get(labels, 0.0) + value

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name][labels] = value


_OF_GPUS = {"hpctrain_gpu_utilisation_ratio": "utilisation", "hpctrain_gpu_memory_bytes": "memory_bytes"}
_ABSENT_AT_FIRST = frozenset({"hpctrain_device_compute_seconds_total"})


# How the reason of a stop begins if the run stops to continue on another number of nodes.
SCALING_STOP = "scaling: "


def stop_reason(text: str) -> str:
    """Returns the label `signal`, `time_limit` or `scaling` for a stop.

    text: the field `reason` of a record `stopped`, which contains the names of signals, names a time limit, or says
    on how many nodes the run is to continue.
    """
    if text.startswith(SCALING_STOP):
        return "scaling"
    return "signal" if text.startswith("SIG") else "time_limit"
