"""The schemas of the sections [checkpoint], [guards], [limits], [scaling], [stop], [stragglers] and [telemetry]."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hpctrain.errors import UsageError
from hpctrain.resilience import DEFAULT_STOP_SIGNALS, SignalName
from hpctrain.scaling import parse_rate, parse_trace_steps

# Base class of the sections of a recipe.


class RecipeSection(BaseModel):
    """The base of all sections: immutable, without unknown keys and implicit type conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Section [guards] of the recipe.


DEFAULT_JUMP_Z = 20.0


class GuardsSection(RecipeSection):
    """What a run does when it diverges or runs out of memory; see runbooks/f5-divergence.md and f6-out-of-memory.md."""

    loss_jump_z: float | None = Field(
        None,
        ge=0,
        description="A step whose loss is at least this many robust standard deviations (from the median absolute "
        "deviation; of the logarithm, if all losses are positive) above the recent losses is skipped on all "
        "ranks. 0: off. Absent: 20, or 0 with `data.order` = `sequential`, where neighbouring samples may be "
        "alike.",
    )
    loss_window: int = Field(
        100,
        ge=10,
        description="Number of recent losses that are looked at; until there are this many, no loss counts as a jump.",
    )
    max_roll_backs: int = Field(
        3,
        ge=0,
        description="More than `optimizer.max_skipped_in_row` skipped steps in a row roll the run back to a checkpoint "
        "from before, at most this many times in the whole run; then it ends with code 7.",
    )
    roll_back_lr_factor: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Each roll-back multiplies the learning rate by this, for the rest of the run.",
    )
    roll_back_skips_data: bool = Field(
        False,
        description="After a roll-back continue with the data after those on which the run diverged, instead of "
        "repeating the data since the checkpoint. The number of steps stays the same.",
    )
    out_of_memory: Literal["divide", "stop"] = Field(
        "divide",
        description="`divide`: if a rank or its device runs out of memory in forward or backward, all ranks use twice "
        "as many micro-batches from then on, and compute the batch again. `stop`: the run ends with code 8.",
    )
    host_memory: Literal["unlimited", "share"] = Field(
        "unlimited",
        description="`share`: each rank limits its own memory to its share of 90% of what its control group (a Slurm "
        "job, a container) allows. Then an allocation fails, with an error that `out_of_memory` handles, before the "
        "kernel kills the rank.",
    )
    max_imbalance: float = Field(
        0.1,
        gt=0,
        description="A rank that computes more samples in an epoch than the mean of the ranks, by more than this "
        "fraction, is reported.",
    )
    compare_ranks: Literal["error", "note", "off"] | None = Field(
        None,
        description="In the first steps, and then every 100, the ranks compare their parameters; every 10, the "
        "settings of their optimizers (learning rate). `error`: a difference ends the run with code "
        "4, and names tensors and ranks. `note`: it is printed once, and the run continues. `off`: "
        "nothing is compared. Absent: `error`, or `note` with `checkpoint.on_replica_mismatch` = "
        "`rank0`.",
    )


# Section [limits] of the recipe.


class LimitsSection(RecipeSection):
    """How long a rank waits for other ranks in each part of a run; see runbooks/f3-hang-or-lost-rank.md."""

    derive: bool = Field(
        True,
        description="End the run when a rank is found hung before `run.timeout_s` is over: when others have "
        "waited for it longer than 10 times the slowest step, input or save of this run, and its "
        "process is stopped, has ended or uses no CPU time.",
    )
    least_s: float = Field(
        60.0, gt=0,
        description=(
            "Smallest limit that is derived for a step, s; for input and saves the smallest is five times "
            "this."
        ),
    )  # fmt: skip
    start_s: float | None = Field(
        None, gt=0, description="Time limit of a wait before training begins, s. Absent: `run.timeout_s`."
    )  # fmt: skip
    step_s: float | None = Field(
        None, gt=0,
        description="Time limit of a wait in a step, in which other ranks may still read their batch, s. Like "
            "`input_s`, `save_s` and `load_s` it replaces `run.timeout_s` and the derived limit.",
    )  # fmt: skip
    input_s: float | None = Field(
        None,
        gt=0,
        description="Time limit of a wait for a batch, between two steps, s; it also applies if no other rank "
        "waits.",
    )
    save_s: float | None = Field(
        None, gt=0, description="Time limit of a wait while a checkpoint is saved, s."
    )
    load_s: float | None = Field(
        None, gt=0, description="Time limit of a wait while a checkpoint is loaded, s."
    )


# Section [scaling] of the recipe.


class ScalingSection(RecipeSection):
    """Advice on the number of nodes, and whether the run acts on this advice; see guides/predicting.md."""

    goal: Literal["balance", "time", "node-hours", "energy"] = Field(
        "balance",
        description="What another number of nodes is to lower: the time to the end, the node-hours, the energy, or "
        "with `balance` the product of time and node-hours.",
    )
    least_gain_percent: float = Field(
        5.0,
        ge=0,
        lt=100,
        description="Smallest decrease of the goal for which another number of nodes is advised, in percent. The whole "
        "90 % interval of the prediction must be below.",
    )
    min_nodes: int | None = Field(
        None, ge=1, description="Smallest number of nodes that is advised. Absent: 1."
    )
    max_nodes: int | None = Field(
        None,
        ge=1,
        description="Largest number of nodes that is advised. Absent: four times the present number.",
    )
    link: str | None = Field(
        None,
        description="Rate of a node's link, such as `25gbit`, for a run on one node, which cannot measure the link. "
        "Other runs use what they measure.",
    )

    act: bool = Field(
        False,
        description="Whether the run acts on the advice: after a save it stops, and its job (of `hpctrain slurm "
        "submit`) continues it on the advised number of nodes. Needs `max_nodes`.",
    )
    act_after_minutes: float = Field(
        30.0,
        ge=0,
        description="`act`: time from the start of training to the first request for other nodes, counted again from "
        "each start, in minutes.",
    )

    every_s: float = Field(30.0, gt=0, description="Time between two computations of the advice, s.")

    @field_validator("link")
    @classmethod
    def _is_rate(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_rate(value)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _limits_fit(self) -> ScalingSection:
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes = {self.min_nodes} is above max_nodes = {self.max_nodes}")
        if self.act and self.max_nodes is None:
            raise ValueError(
                "act = true needs max_nodes: the largest number of nodes that the run may ask for"
            )
        return self


# Section [stop] of the recipe.


class StopSection(RecipeSection):
    """When the run stops before its last step, with its state saved and exit code 75; see guides/stopping.md."""

    signals: list[SignalName] = Field(
        list(DEFAULT_STOP_SIGNALS),
        min_length=1,
        description="Signals that ask for a stop; one rank that receives one is enough. A second one, 2 s later or "
        "more, ends the rank at once without a save.",
    )
    after_s: float | None = Field(
        None,
        gt=0,
        description="The run must have stopped this long after its start, s; counted again from each start. The "
        "earliest of this, HPCTRAIN_DEADLINE and Slurm's time limit counts.",
    )
    margin_s: float = Field(
        30.0,
        ge=0,
        description="Safety margin, s: a run stops when the time left is shorter than a step and a save (the 95th "
        "percentile of the recent ones) plus this margin.",
    )

    @field_validator("signals")
    @classmethod
    def _different(cls, signals: list[SignalName]) -> list[SignalName]:
        if len(set(signals)) < len(signals):
            raise ValueError(f"names {', '.join(signals)}: each signal once")
        return signals


# Section [stragglers] of the recipe.


class StragglersSection(RecipeSection):
    """How ranks, nodes and links that are slower than others are found; see guides/stragglers.md."""

    find: bool = Field(
        True,
        description="Compare the ranks' own times while training, and name a slow rank with its probable cause. "
        "Nothing is compared on one rank.",
    )
    window_s: float = Field(
        10.0,
        gt=0,
        description="Time between comparisons, s. At least five steps lie between two comparisons, "
        "however long they take.",
    )
    windows: int = Field(
        3,
        ge=1,
        description="Number of comparisons in a row that must agree before a rank is reported as slow, and before "
        "it is reported as normal again; more are needed where single comparisons often stand out.",
    )
    min_excess: float = Field(
        0.1,
        gt=0,
        description="A rank is slow if its own work exceeds the median of the ranks by this share of a step. The "
        "excess must also be more than three robust deviations, and 2 ms.",
    )
    probe: Literal["off", "when-slow", "start"] = Field(
        "when-slow",
        description="When the links between nodes are measured. `when-slow`: briefly after the first comparison, "
        "and when communication has become slower. `start`: also before training, all pairs of nodes, "
        "and each rank's memory and arithmetic; the results are in `probe.json`.",
    )


# Schema of the recipe's section [telemetry].


class TelemetrySection(RecipeSection):
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
        description="Steps in which every rank records when each part began and ended, such as `100-105,2000`, for "
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


# Section [checkpoint] of the recipe.


class CheckpointSection(RecipeSection):
    """When and how the state is saved. It is also saved at the end, and when the run is asked to stop."""

    every_steps: int | None = Field(None, ge=1, description="Steps between saves.")
    every_minutes: float | None = Field(None, gt=0, description="Save when this many minutes have passed.")
    every: Literal["auto"] | None = Field(
        None,
        description="`auto`: save at the interval that loses the least time (Young/Daly), computed from "
        "`failures_per_day` and the cost of the run's checkpoints so far; the first save is after a minute.",
    )
    failures_per_day: float | None = Field(
        None, gt=0,
        description="Expected number of failures of the whole job per day. If set, the interval that loses the "
            "least time is printed.",
    )  # fmt: skip
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="`async`: training is blocked only while its state is copied; the copy is written in the "
        "background. Needs memory for a second copy of the rank's share of the state.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="`async`: whether a checkpoint that is due while the previous one is still being written waits for "
        "it or is skipped.",
    )
    limit_mb_per_s: float | None = Field(
        None,
        gt=0,
        description="Maximum write rate of each rank, MB/s, for disks that the training also reads from.",
    )
    files: int | Literal["node"] = Field(
        1,
        description="Files per checkpoint. 1: one file. More, or `node` (one per node): a folder of files, for "
        "filesystems that are slow if many nodes write one file.",
    )
    keep: int = Field(
        3,
        ge=1,
        description="Newest checkpoints to keep; older ones are deleted once a newer one is committed.",
    )
    keep_every: int | None = Field(
        None, ge=1, description="Also keep, permanently, checkpoints whose step is a multiple of this."
    )
    keep_best: str | None = Field(
        None,
        description="Also keep the best checkpoint: METRIC:min or METRIC:max, such as `accuracy:max`, for a metric of "
        "the task's `metrics` in the newest evaluation.",
    )
    engine: Literal["auto", "direct", "mpio"] = Field(
        "auto",
        description="`mpio`: MPI-IO, which collects small pieces into large writes. `direct`: every rank writes its "
        "byte ranges with POSIX calls.",
    )
    page_cache: Literal["auto", "use", "bypass"] = Field(
        "auto",
        description="Whether checkpoints are written through the kernel's page cache. `bypass` needs less processor "
        "time; if the filesystem does not support it, the cache is used. `auto`: bypass on ext4 and xfs.",
    )
    replica_check: Literal["sampled", "full", "off"] = Field(
        "sampled",
        description="Whether a save compares the ranks' copies of parameters and optimizer state. `sampled`: 1/64 of "
        "each tensor, at most 64 MiB, another part in each save. `full`: every byte, hashed by every rank.",
    )
    on_replica_mismatch: Literal["error", "rank0"] = Field(
        "error",
        description="What a save does if copies differ. `error`: the run ends with code 4 and nothing is saved. "
        "`rank0`: rank 0's copies are saved, with a warning.",
    )
    signal: SignalName | Literal["none"] = Field(
        "SIGUSR2", description="Signal that asks for a checkpoint after the current step, or `none`."
    )
    directory: str | None = Field(
        None, description="Directory of the checkpoints. Default: `checkpoints` in the run directory."
    )

    local: str | None = Field(
        None, min_length=1,
        description="A directory on each node's own storage: a checkpoint is written there first, then copied to "
        "another node and into `directory` in the background, where it is committed. See guides/checkpoint-tiers.md.",
    )  # fmt: skip
    local_keep: int = Field(1, ge=1, description="`local`: number of checkpoints to keep on the nodes.")
    weights_from: str | None = Field(
        None, min_length=1,
        description="A checkpoint, or a directory of checkpoints, whose weights a new run starts from. Not used if the "
        "run resumes.",
    )  # fmt: skip
    weights_map: dict[str, str] = Field(
        default_factory=dict,
        description="`weights_from`: prefixes of names in that checkpoint, and their replacements in this run, such as "
        '`{ "encoder." = "backbone." }`.',
    )
    weights_strict: bool = Field(
        True,
        description="`weights_from`: a tensor that does not match the model is an error; `false`: it is reported "
        "and left out.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CheckpointSection:
        if isinstance(self.files, int) and self.files < 1:
            raise ValueError(f'files is {self.files}: give a number of at least 1, or "node"')
        if self.local is not None and self.files not in (1, "node"):
            raise ValueError("local keeps one file per node: leave files out")
        if self.engine == "mpio" and (self.mode == "async" or self.limit_mb_per_s is not None):
            raise ValueError(
                "engine = 'mpio' writes with all ranks at once, without a limit: it cannot be combined with mode = "
                "'async' or limit_mb_per_s"
            )
        if self.engine == "mpio" and self.page_cache == "bypass":
            raise ValueError("page_cache = 'bypass' needs engine = 'direct' or 'auto'")
        if self.weights_from is None and (self.weights_map or not self.weights_strict):
            raise ValueError("weights_map and weights_strict need weights_from")
        if self.every is not None and self.failures_per_day is None:
            raise ValueError("every = 'auto' needs failures_per_day: how often the whole job fails")
        if self.every is not None and self.every_minutes is not None:
            raise ValueError("every = 'auto' and every_minutes: leave one of the two out")
        if self.when_busy == "skip" and self.mode == "sync":
            raise ValueError("when_busy = 'skip' needs mode = 'async'")
        if self.keep_best is not None and not self.keep_best.strip(":").endswith((":min", ":max")):
            raise ValueError(
                f"keep_best is {self.keep_best!r}: write METRIC:min or METRIC:max, such as accuracy:max"
            )
        return self
