"""The catalogue of the metrics that a running process exposes: names, types, units, labels and purposes.

Names follow Prometheus' rules (prometheus.io/docs/practices/naming): base units, `_total` for counters. The guide
`docs/guides/metrics-out.md` contains this table; a test compares the two.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpctrain.telemetry.step_clock import STEP_PARTS


class MetricType(enum.Enum):
    """The type of a metric, by Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(enum.Enum):
    """The processes that expose a metric.

    RUN: rank 0 only, since the metric describes the whole run. RANK: the first rank of each node, if this rank records
    its steps; the label `rank` is the index of this rank.
    """

    RUN = "run"
    RANK = "rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        labels: The labels of the metric besides `rank`, which all metrics of `Scope.RANK` have.
        serves: The purposes of the metric, from the list M1 to M15 in docs/guides/metrics-out.md.
        buckets: The upper bounds of a histogram's buckets, ascending, without infinity.
    """

    name: str
    type: MetricType
    unit: str  # "" for a number without a unit
    help: str
    serves: tuple[str, ...]
    scope: Scope = Scope.RUN
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (*(("rank",) if self.scope is Scope.RANK else ()), *self.labels)


# The labels that distinguish the series of two runs: of the scrape target, or of every series in a text file.
# `run_id` is a hash of the run directory, so it stays the same over restarts and requeues.
RUN_LABELS = ("run", "run_id")
INFO_LABELS = (
    *RUN_LABELS, "job_id", "directory", "version", "launcher", "backend", "algorithm", "wire", "device",
)  # fmt: skip

# Six bounds per decade: a quantile that is interpolated between two is wrong by at most a fifth of its value.
STEP_BUCKETS_S = tuple(
    float(f"{digit}e{exponent}") for exponent in range(-3, 2) for digit in (1, 1.5, 2, 3, 5, 7)
)
WRITE_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_COUNTER, _GAUGE, _HISTOGRAM = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM
_RANK = Scope.RANK

CATALOGUE: tuple[Metric, ...] = (
    # The run
    Metric(
        name="hpctrain_run_info", type=_GAUGE, unit="", labels=INFO_LABELS, serves=("M1",),
        help="Always 1; its labels say which run this is, and how it runs.",
    ),
    Metric(
        name="hpctrain_start_time_seconds", type=_GAUGE, unit="seconds", serves=("M2", "M14"),
        help="When this start of the run began, in seconds since 1970.",
    ),
    Metric(
        name="hpctrain_startup_seconds", type=_GAUGE, unit="seconds", serves=("M2", "M14"),
        help="Time from the beginning of this start to its first step; absent before that.",
    ),
    Metric(name="hpctrain_ranks", type=_GAUGE, unit="", serves=("M3", "M13"), help="Ranks of the run."),
    Metric(name="hpctrain_nodes", type=_GAUGE, unit="", serves=("M13",), help="Nodes of the run."),
    Metric(
        name="hpctrain_node_seconds_total", type=_COUNTER, unit="seconds", serves=("M13", "M14"),
        help="Nodes times seconds since this start began.",
    ),
    Metric(
        name="hpctrain_time_left_seconds", type=_GAUGE, unit="seconds", serves=("M2", "M10"),
        help="Time until the run must have ended, negative once that has passed; absent if no limit is known.",
    ),
    # Progress
    Metric(
        name="hpctrain_step", type=_GAUGE, unit="", serves=("M1", "M2"),
        help="Optimizer steps since the beginning of the run; falls when the run is rolled back.",
    ),
    Metric(
        name="hpctrain_target_steps", type=_GAUGE, unit="", serves=("M1", "M2"),
        help="Steps after which the run is finished.",
    ),
    Metric(name="hpctrain_epoch", type=_GAUGE, unit="", serves=("M13",), help="Epoch of the last step, from 0."),
    Metric(
        name="hpctrain_steps_total", type=_COUNTER, unit="", serves=("M2", "M3"),
        help="Steps done by this start, skipped ones included.",
    ),
    Metric(
        name="hpctrain_samples_total", type=_COUNTER, unit="", serves=("M3",),
        help="Samples trained in the steps of this start, over all ranks.",
    ),
    Metric(
        name="hpctrain_skipped_samples_total", type=_COUNTER, unit="", serves=("M3",),
        help="Samples that were left out because they are damaged, over all ranks.",
    ),
    Metric(
        name="hpctrain_last_step_timestamp_seconds", type=_GAUGE, unit="seconds", serves=("M1", "M14"),
        help="When the last step ended, in seconds since 1970; before the first step, when training began.",
    ),
    # Advice on the number of nodes
    Metric(
        name="hpctrain_advised_nodes", type=_GAUGE, unit="", serves=("M13",),
        help="Nodes that the run advises for its remaining steps, the present number if it should stay; absent before "
        "the first advice.",
    ),
    Metric(
        name="hpctrain_advised_time_ratio", type=_GAUGE, unit="ratio", serves=("M2", "M13"),
        help="Predicted time to the end on the advised nodes, divided by that on the present ones.",
    ),
    Metric(
        name="hpctrain_advised_node_time_ratio", type=_GAUGE, unit="ratio", serves=("M13",),
        help="Predicted node-hours to the end on the advised nodes, divided by those on the present ones; energy is "
        "proportional to them.",
    ),
    # Learning
    Metric(
        name="hpctrain_loss", type=_GAUGE, unit="", serves=("M12",),
        help="Loss of the last step, mean over the global batch.",
    ),
    Metric(
        name="hpctrain_gradient_norm", type=_GAUGE, unit="", serves=("M12",),
        help="2-norm of the last step's mean gradient before clipping; NaN when the step was skipped.",
    ),
    Metric(
        name="hpctrain_learning_rate", type=_GAUGE, unit="", serves=("M12",),
        help="Learning rate of the last step.",
    ),
    Metric(
        name="hpctrain_loss_scale", type=_GAUGE, unit="", serves=("M12",),
        help="Loss scale of the last step; 1 without float16.",
    ),
    Metric(
        name="hpctrain_evaluation", type=_GAUGE, unit="", labels=("metric",), serves=("M12",),
        help="Value of each of the task's metrics in the newest evaluation on held-out data.",
    ),
    Metric(
        name="hpctrain_skipped_steps_total", type=_COUNTER, unit="", serves=("M12",),
        help="Steps of this start that left the parameters unchanged: gradients or loss not finite, or a loss jump.",
    ),
    Metric(
        name="hpctrain_loss_jumps_total", type=_COUNTER, unit="", serves=("M12",),
        help="Steps of this start that were dropped because their loss jumped or was not finite.",
    ),
    Metric(
        name="hpctrain_roll_backs_total", type=_COUNTER, unit="", serves=("M12",),
        help="Roll-backs to a checkpoint in this start.",
    ),
    # Where the time goes
    Metric(
        name="hpctrain_step_seconds", type=_HISTOGRAM, unit="seconds", scope=_RANK, serves=("M5",),
        buckets=STEP_BUCKETS_S, help="Time of a step, evaluation and checkpoint included.",
    ),
    Metric(
        name="hpctrain_step_part_seconds_total", type=_COUNTER, unit="seconds", scope=_RANK, labels=("part",),
        serves=("M4", "M6", "M9"),
        help="Time of the steps by part; the parts add up to the steps. compute has no reduction in flight, "
        "hidden_sync has; bubble is waiting for other stages of a pipeline; exposed_sync is waiting for "
        "communication and for slower ranks.",
    ),
    Metric(
        name="hpctrain_sync_seconds_total", type=_COUNTER, unit="seconds", scope=_RANK, serves=("M9",),
        help="Time with a gradient reduction in flight, on any thread.",
    ),
    Metric(
        name="hpctrain_device_compute_seconds_total", type=_COUNTER, unit="seconds", scope=_RANK, serves=("M4",),
        help="Time of forward and backward on the GPU, by events; absent on the CPU.",
    ),
    Metric(
        name="hpctrain_ranks_part_seconds_total", type=_COUNTER, unit="seconds", labels=("part",),
        serves=("M4", "M9", "M14"),
        help="Time of the steps by part, summed over all ranks, also those that record no steps, up to the last record "
        "`efficiency`: "
        + ", ".join(f"{part.name} ({part.note})" if part.note else part.name for part in STEP_PARTS)
        + ".",
    ),
    Metric(
        name="hpctrain_efficiency_ratio", type=_GAUGE, unit="ratio", labels=("factor",), serves=("M9", "M14"),
        help="POP efficiencies of the last window of steps: parallel, load_balance, communication, serialisation, "
        "transfer, computing.",
    ),
    Metric(
        name="hpctrain_last_collective_timestamp_seconds", type=_GAUGE, unit="seconds", scope=_RANK, serves=("M9",),
        help="When this rank's last collective operation ended, in seconds since 1970.",
    ),
    Metric(
        name="hpctrain_slow", type=_GAUGE, unit="", labels=("cause",), serves=("M5",),
        help="Ranks, nodes and links that are slow now, by cause: input, compute, other, checkpoint, network.",
    ),
    Metric(
        name="hpctrain_data_imbalance_ratio", type=_GAUGE, unit="ratio", labels=("of",), serves=("M5",),
        help="Imbalance of the data: samples or bytes of the rank that got most in the last epoch, divided by the "
            "mean over the ranks.",
    ),
    # Network and machine
    Metric(
        name="hpctrain_reduced_bytes_total", type=_COUNTER, unit="bytes", scope=_RANK, serves=("M8",),
        help="Bytes of this rank's gradients that were summed over the ranks, before compression; updated every 100 "
            "steps.",
    ),
    Metric(
        name="hpctrain_sent_bytes_total", type=_COUNTER, unit="bytes", scope=_RANK, serves=("M8",),
        help="Bytes that this rank has sent to other nodes, after compression: for the gradient reduction and in the "
            "groups of a split model.",
    ),
    Metric(
        name="hpctrain_cpu_seconds_total", type=_COUNTER, unit="seconds", scope=_RANK, serves=("M4",),
        help="CPU time of this rank's process, all threads.",
    ),
    Metric(
        name="hpctrain_cores", type=_GAUGE, unit="", scope=_RANK, serves=("M4",),
        help="Cores that this rank's process may run on.",
    ),
    Metric(
        name="hpctrain_resident_memory_bytes", type=_GAUGE, unit="bytes", scope=_RANK, serves=("M4",),
        help="Resident memory of this rank's process.",
    ),
    Metric(
        name="hpctrain_energy_joules_total", type=_COUNTER, unit="joules", scope=_RANK, labels=("source",),
        serves=("M13",),
        help="Energy of this rank's node, by counter: RAPL, NVML, or Cray pm_counters, which includes the others. "
        "Absent where none can be read.",
    ),
    Metric(
        name="hpctrain_gpu_utilisation_ratio", type=_GAUGE, unit="ratio", scope=_RANK, labels=("gpu",), serves=("M4",),
        help="Share of the last sampling period in which a kernel ran on the GPU, by the GPU's number on the node.",
    ),
    Metric(
        name="hpctrain_gpu_memory_bytes", type=_GAUGE, unit="bytes", scope=_RANK, labels=("gpu",), serves=("M4",),
        help="Memory in use on the GPU, by the GPU's number on the node.",
    ),
    Metric(
        name="hpctrain_out_of_memory_total", type=_COUNTER, unit="", serves=("M4",),
        help="How often a rank ran out of memory in this start, and the batch was computed again in smaller parts.",
    ),
    Metric(
        name="hpctrain_micro_batches", type=_GAUGE, unit="", serves=("M4",),
        help="Micro-batches in which a rank computes its share of the batch now.",
    ),
    Metric(
        name="hpctrain_damaged_blocks_total", type=_COUNTER, unit="", scope=_RANK, serves=("M1",),
        help="Damaged blocks of data that this rank met.",
    ),
    # Checkpoints
    Metric(
        name="hpctrain_checkpoints_attempted_total", type=_COUNTER, unit="", serves=("M7",),
        help="Checkpoints that were begun in this start.",
    ),
    Metric(
        name="hpctrain_checkpoints_committed_total", type=_COUNTER, unit="", serves=("M7",),
        help="Checkpoints that were written, hashed and renamed to their final name.",
    ),
    Metric(
        name="hpctrain_checkpoints_verified_total", type=_COUNTER, unit="", serves=("M7",),
        help="Checkpoints that were read back by the run itself and found good.",
    ),
    Metric(
        name="hpctrain_checkpoints_failed_total", type=_COUNTER, unit="", serves=("M7",),
        help="Checkpoints that could not be written, or that read back damaged.",
    ),
    Metric(
        name="hpctrain_checkpoints_skipped_total", type=_COUNTER, unit="", serves=("M7",),
        help="Checkpoints that were due while another was still being written.",
    ),
    Metric(
        name="hpctrain_checkpoint_write_seconds", type=_HISTOGRAM, unit="seconds", buckets=WRITE_BUCKETS_S,
        serves=("M6",), help="Time from the beginning of a save until the checkpoint was committed.",
    ),
    Metric(
        name="hpctrain_checkpoint_stall_seconds_total", type=_COUNTER, unit="seconds", serves=("M6",),
        help="Time for which training on rank 0 waited for the committed checkpoints.",
    ),
    Metric(
        name="hpctrain_checkpoint_bytes_total", type=_COUNTER, unit="bytes", serves=("M6",),
        help="Size of the committed checkpoints.",
    ),
    Metric(
        name="hpctrain_last_checkpoint_timestamp_seconds", type=_GAUGE, unit="seconds", serves=("M7",),
        help="When the newest checkpoint was committed, in seconds since 1970; before the first, when training began.",
    ),
    Metric(
        name="hpctrain_last_checkpoint_step", type=_GAUGE, unit="", serves=("M7",),
        help="Step of the newest committed checkpoint.",
    ),
    # All starts of the run, as its directory records them
    Metric(
        name="hpctrain_starts_total", type=_COUNTER, unit="", serves=("M1", "M11"),
        help="Starts of the run that reached training, including this one.",
    ),
    Metric(
        name="hpctrain_resumes_attempted_total", type=_COUNTER, unit="", serves=("M11",),
        help="Starts of the run after the first: of `hpctrain supervise` where it starts them, otherwise those that "
        "reached training.",
    ),
    Metric(
        name="hpctrain_resumes_completed_total", type=_COUNTER, unit="", serves=("M11",),
        help="Starts of the run after the first that reached training.",
    ),
    Metric(
        name="hpctrain_requeues_total", type=_COUNTER, unit="", serves=("M15",),
        help="How often Slurm has requeued the job (SLURM_RESTART_COUNT).",
    ),
    Metric(
        name="hpctrain_stops_total", type=_COUNTER, unit="", labels=("reason",), serves=("M10",),
        help="How often the run was stopped before its last step, with its state saved: by a signal, as at a "
        "preemption, by the time_limit, or by scaling, to continue on another number of nodes.",
    ),
    Metric(
        name="hpctrain_failed_attempts_total", type=_COUNTER, unit="", labels=("cause",), serves=("M1",),
        help="Attempts of `hpctrain supervise` that failed, by cause.",
    ),
    Metric(
        name="hpctrain_lost_steps_total", type=_COUNTER, unit="", serves=("M10",),
        help="Steps that were repeated after a restart or a roll-back, over all starts of the run.",
    ),
    Metric(
        name="hpctrain_lost_seconds_total", type=_COUNTER, unit="seconds", serves=("M10",),
        help="Time that the repeated steps had taken the first time.",
    ),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}
