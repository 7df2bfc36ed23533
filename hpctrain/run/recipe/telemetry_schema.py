"""Schema of the recipe's section [telemetry]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from hpctrain.run.recipe.section import Section
from hpctrain.scaling import parse_trace_steps


class TelemetrySection(Section):
    """Progress, metrics and evaluation."""

    progress_every_s: float = Field(5.0, gt=0, description="Time between rank 0's progress lines, s.")
    metrics_every_steps: int = Field(1, ge=1, description="Steps between metrics records of each rank.")
    ranks: Literal["auto", "all", "node", "rank0"] = Field(
        "auto",
        description="Ranks that record their steps: `all`, the first rank of each `node`, or `rank0`. `auto`: all, "
        "with more than 64 ranks the first of each node. The summary is over all ranks in any case.",
    )
    sample_sums: bool = Field(
        False,
        description="Whether records of steps have a hash of the set of samples, by which to compare what runs on "
        "different numbers of ranks have seen.",
    )
    write_every_s: float = Field(
        1.0,
        ge=0,
        description="Time for which a rank collects the records of steps before it writes them to its file, s. A "
        "killed rank loses those. 0: each step is written at once.",
    )
    evaluate_every_steps: int | None = Field(
        None, ge=1, description="Steps between evaluations on held-out data. There is always one at the end."
    )
    trace_steps: str | None = Field(
        None,
        description="Steps of which every rank writes down when each part began and ended, as `100-105,2000`, for "
        "`hpctrain trace`; see guides/efficiency.md.",
    )

    prometheus: Literal["off", "endpoint", "textfile"] = Field(
        "off",
        description="How Prometheus gets the run's metrics: from an HTTP `endpoint` of the first rank of each node, or "
        "from a `textfile` that node exporter reads; see guides/metrics-out.md. Needs the package prometheus-client.",
    )
    prometheus_address: str = Field(
        "127.0.0.1",
        min_length=1,
        description="`endpoint`: the address to listen on. `0.0.0.0`: all of the node's. There is neither encryption "
        "nor a password.",
    )
    prometheus_port: int = Field(
        0, ge=0, lt=65536, description="`endpoint`: the port, the same on every node. 0: one that is free."
    )
    prometheus_targets: str | None = Field(
        None,
        min_length=1,
        description="`endpoint`: the directory in which rank 0 writes where the endpoints are, for Prometheus' "
        "`file_sd_configs`. Absent: `metrics/prometheus` in the run directory.",
    )
    prometheus_directory: str | None = Field(
        None,
        min_length=1,
        description="`textfile`: the directory on each node that its node exporter reads "
        "(`--collector.textfile.directory`).",
    )
    prometheus_every_s: float = Field(15.0, gt=0, description="`textfile`: the time between two files, s.")
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Where an OpenTelemetry collector takes metrics over OTLP/HTTP, such as `http://127.0.0.1:4318`. "
        "The first rank of each node sends them; see guides/tracking.md. Needs `hpctrain[otlp]`.",
    )
    otlp_every_s: float = Field(15.0, gt=0, description="`otlp_endpoint`: the time between two exports, s.")
    tensorboard: bool = Field(
        False,
        description="Whether rank 0 writes the run's numbers for TensorBoard, in `tensorboard` in the run directory. "
        "Needs `hpctrain[tensorboard]`.",
    )
    energy_every_s: float = Field(
        10.0,
        ge=0,
        description="Time between readings of the energy counters of each node, where there are some that can be read, "
        "s; see guides/tracking.md. 0: they are not read.",
    )

    @field_validator("trace_steps")
    @classmethod
    def _is_ranges(cls, value: str | None) -> str | None:
        if value is not None:
            parse_trace_steps(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> TelemetrySection:
        if (self.prometheus_directory is not None) != (self.prometheus == "textfile"):
            raise ValueError(
                "prometheus = 'textfile' and prometheus_directory belong together: set both or neither"
            )
        return self
