"""Schema of the recipe, the TOML file that describes one run. It is validated before anything communicates.

`docs/recipe.md` is generated from the sections' docstrings and the fields' descriptions.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from hpctrain.errors import UsageError
from hpctrain.reduce import AUTO, AUTO_WIRES, WIRE_FORMATS, find_wire, listed_wires, wire_names
from hpctrain.run.compute.device_names import DEVICE_NAMES
from hpctrain.run.recipe.parallel_schema import ParallelSection, check_enough_samples, check_parallel
from hpctrain.run.recipe.schedule_schema import ScheduleSection, check_adasum, check_schedule
from hpctrain.run.recipe.sections import (
    CheckpointSection,
    GuardsSection,
    LimitsSection,
    RecipeSection,
    ScalingSection,
    StopSection,
    StragglersSection,
    TelemetrySection,
)
from hpctrain.run.recipe.slurm_schema import SlurmSection


class RunSection(RecipeSection):
    """The run: its length, files, backend, device and precision."""

    directory: str = Field(description="Run directory: records, metrics, checkpoints. Shared by all nodes.")
    name: str = Field("run", min_length=1, description="Name of the run in its output and tables.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of model initialisation and sample order.")
    epochs: int | None = Field(
        None, ge=1, description="Train this many passes over the data. Set either this or `steps`."
    )
    steps: int | None = Field(
        None, ge=1, description="Train this many optimizer steps. Set either this or `epochs`."
    )
    ranks: int | None = Field(
        None, ge=1, description="Required number of ranks; with another number the run does not start."
    )
    elastic_batch: Literal["fixed", "per-rank"] = Field(
        "fixed",
        description="Elastic runs (`hpctrain supervise --elastic MIN:MAX`): what stays when the number of ranks "
        "changes. `fixed`: data.global_batch; fewer ranks compute their larger shares in more micro-batches. "
        "`per-rank`: data.global_batch / MAX samples per rank; the learning rate follows by `optimizer.lr_scaling`.",
    )
    backend: Literal["auto", "horovod", "mpi", "serial"] = Field(
        "auto",
        description="Communication backend. `auto`: MPI; with GPUs, Horovod for the gradients if it is built with "
        "NCCL. `horovod`: its all-reduce for the algorithms flat, hierarchical-flat and NCCL's, MPI for the rest.",
    )
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = Field(
        "fp32",
        description="`fp32`, `fp64`: dtype of the model. `bf16`, `fp16`: a float32 model, autocast around forward. "
        "Floating-point fields of a batch are passed to the task in the model's dtype.",
    )
    channels_last: bool = Field(
        False,
        description="Keep the weights of convolutions in the memory order of torch.channels_last (NHWC), in which "
        "they are often faster. The results differ by rounding; checkpoints load either way.",
    )
    compile: bool = Field(
        False,
        description="Compile the model with torch.compile: on one rank of each node at the start, the others take the "
        "code from the node's cache. Needs a C++ compiler on every node. Not with split models or `sync_batch_norm`; "
        "not yet tested on a GPU. The results differ by rounding; checkpoints load either way.",
    )
    device: str = Field(
        "auto",
        pattern=rf"^({DEVICE_NAMES})$",
        description="`auto`: CUDA if every rank has a separate device, else the CPU on all ranks. `cuda`: a separate "
        "device for each rank, or an error. `cuda:0`: the first device of each machine, shared by its ranks; not with "
        "NCCL.",
    )
    threads_per_rank: int | None = Field(
        None,
        ge=1,
        description="CPU threads of torch in each rank. Default: OMP_NUM_THREADS, or the rank's cores.",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="A collective operation that takes longer ends the run with code 6. Ranks give up earlier, by a "
        "quarter of this time but at most 5 s, so that all have ended by then. `[limits]` has separate limits "
        "for the parts of a run.",
    )
    deterministic: bool = Field(
        True,
        description="Use torch's deterministic algorithms, so that a resumed run gives bit-identical results.",
    )


class TaskSection(RecipeSection):
    """The task: model, loss and metrics."""

    target: str = Field(
        pattern=r"^[\w.]+:[\w.]+$",
        description="`module:Class` of the task. The recipe's folder and the working directory are searched too.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")


class DataSection(RecipeSection):
    """Training and evaluation data."""

    train: str = Field(description="Dataset directory made by `hpctrain data pack`.")
    held_out: str | None = Field(None, description="Dataset directory for evaluation.")
    global_batch: int = Field(ge=1, description="Samples per optimizer step, over all ranks.")
    micro_batches: int = Field(
        1,
        ge=1,
        description="Number of micro-batches in which a rank computes its share of the batch; gradients are "
        "reduced after the last.",
    )
    order: Literal["shuffle", "blocks", "sequential", "weighted", "stratified"] | None = Field(
        None,
        description="Order of the samples, see guides/data-order.md. `shuffle`: all, in a new order each epoch. "
        "`blocks`: shuffled blocks, mixed within `order_window` of them, for large reads. `sequential`: as stored. "
        "`weighted`: drawn with replacement by `weights`. `stratified`: all, each batch with the classes of `strata` "
        "in the dataset's proportions. Absent: set by `shuffle`.",
    )
    order_block: int | None = Field(
        None, ge=1, description="`blocks`: samples in a block. Absent: as many as fit into 4 MiB."
    )
    order_window: int = Field(
        64, ge=1, description="`blocks`: number of blocks that are mixed with each other."
    )
    weights: str | None = Field(
        None, min_length=1,
        description="`weighted`: a field with one number per sample, or a .npy file of them. An epoch draws as many "
        "samples as the dataset has.",
    )  # fmt: skip
    strata: str | None = Field(
        None, min_length=1,
        description="`stratified`: a field with one integer (the class) per sample, or a .npy file of them.",
    )  # fmt: skip
    shuffle: bool = Field(
        True, description="Short for `order`: `true` is `shuffle`, `false` is `sequential`."
    )
    last_batch: Literal["keep", "drop", "pad"] = Field(
        "keep",
        description="Treatment of the last, smaller batch of an epoch. `pad`: it is filled with copies of its own "
        "samples, which have weight 0 in the loss.",
    )
    io: Literal["auto", "map", "read", "collective"] = Field(
        "auto",
        description="How training data are read. `map`: from memory maps. `read`: with read calls, so that disk errors "
        "are reported. `collective`: by all ranks together, with MPI-IO. `auto`: `map` for local files that fit into "
        "`cache_mb`, else `read`.",
    )
    cache_mb: float | None = Field(
        None, ge=0,
        description="Memory limit of a rank's cache of decoded chunks, and of files mapped with `auto`, MB. Absent: "
        "64 MiB of chunks, and files up to a quarter of the node's memory.",
    )  # fmt: skip
    prefetch_mb: float = Field(64.0, gt=0, description="Memory limit of prefetched batches per rank, MB.")
    check_files: Literal["off", "sizes", "headers"] = Field(
        "sizes",
        description="What is checked of the shards' files at the start, each by one rank: nothing, their sizes, or "
        "also their HDF5 headers. Headers are checked too when a rank first reads a shard.",
    )
    check: Literal["off", "first-epoch", "always"] = Field(
        "off",
        description="Compare data with their hashes: never, each block once per start of the run, or at every read.",
    )
    on_damage: Literal["stop", "skip"] = Field(
        "stop",
        description="If `check` finds a damaged block: end the run, or leave its samples out of the batches and count "
        "them in the metrics and the summary.",
    )
    transform: str | None = Field(
        None, pattern=r"^[\w.]+:[\w.]+$",
        description="`module:function` that computes a training batch's arrays from those that were read. Searched for "
        "like the task.",
    )  # fmt: skip
    held_out_transform: str | None = Field(
        None, pattern=r"^[\w.]+:[\w.]+$", description="The same for held-out batches. Absent: no transform."
    )  # fmt: skip
    workers: int = Field(
        0, ge=0,
        description="Processes of each rank that run `transform`, for Python code that holds the GIL. 0: it runs in "
        "the reading threads.",
    )  # fmt: skip
    stage: str | None = Field(
        None, min_length=1,
        description="A directory on each node's own storage: training shards are copied there in the background, "
        "compared with their hashes, and read from there. Files left by a run are removed by the next one.",
    )  # fmt: skip
    stage_gb: float = Field(100.0, gt=0, description="Maximum size of the copies on a node, GB.")
    memory_store: bool = Field(
        False,
        description="Read the training data once, into the combined memory of all ranks, and fetch every sample from "
        "there with MPI's one-sided reads.",
    )
    evaluation_batch: int = Field(1024, ge=1, description="Samples per evaluation batch, over all ranks.")
    evaluation_samples: int | None = Field(
        None, ge=1,
        description="Evaluate on this many held-out samples, always the same random ones; rounded up to whole "
        "evaluation batches. Absent: on all of them.",
    )  # fmt: skip

    @property
    def chosen_order(self) -> str:
        return self.order or ("shuffle" if self.shuffle else "sequential")

    @model_validator(mode="after")
    def _fits_together(self) -> DataSection:
        if not self.shuffle and self.order not in (None, "sequential"):
            raise ValueError(f"order = {self.order!r} and shuffle = false: leave one of the two out")
        if self.on_damage == "skip" and (self.check == "off" or self.memory_store):
            raise ValueError(
                "on_damage = 'skip' needs check = 'first-epoch' or 'always', and no memory_store"
            )
        if self.io == "collective" and (self.check != "off" or self.memory_store):
            raise ValueError("io = 'collective' needs check = 'off' and no memory_store")
        if self.stage is not None and (self.io == "collective" or self.memory_store):
            raise ValueError("stage cannot be combined with io = 'collective' or memory_store")
        if self.workers and self.transform is None:
            raise ValueError("workers run a transform: set transform, or leave workers out")
        for key, order in (("weights", "weighted"), ("strata", "stratified")):
            if (getattr(self, key) is not None) != (self.chosen_order == order):
                raise ValueError(f"{key} and order = {order!r} belong together: set both or neither")
        return self


# Keys of the section [optimizer] that do not apply to a user's own optimizer.
OF_NAMED_OPTIMIZERS = frozenset({"name", "momentum", "betas", "weight_decay"})


class OptimizerSection(RecipeSection):
    """Optimizer and learning-rate schedule."""

    name: Literal["sgd", "adam", "adamw", "lars", "lamb"] = Field(
        "adamw",
        description="Optimizer. `lars` (You et al. 2017, arXiv:1708.03888) and `lamb` (You et al. 2020, "
        "arXiv:1904.00962) scale each layer's step by its norms, for large batches; they need the package "
        "pytorch-optimizer.",
    )
    target: str | None = Field(
        None, pattern=r"^[\w.]+:[\w.]+$",
        description="`module:Class` or `module:function` instead of `name`, found as the task is. A class is "
            "called with the trainable parameters, `lr` and `options`; a function with the model, `lr` "
            "and `options`. Parameter groups with other learning rates keep their ratio to `lr` through "
            "the schedule.",
    )  # fmt: skip
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of `target`.")
    lr: float = Field(1e-3, gt=0, description="Base learning rate, for a global batch of `reference_batch`.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of `sgd`, `lars`.")
    betas: list[float] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="Betas of `adam`, `adamw`, `lamb`."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    fused: bool = Field(
        True,
        description="Use PyTorch's fused kernels, which update each parameter in one pass over memory, for SGD, Adam, "
        "AdamW and Adagrad, where they fit. The parameters differ from those without it by rounding.",
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="Clip the global gradient norm to this, as torch's `clip_grad_norm_` does. None: off.",
    )
    ema: float | None = Field(
        None, gt=0, lt=1,
        description="Decay of an exponential moving average of the parameters, such as 0.999, updated after each step "
        "that is applied: average = decay * average + (1 - decay) * parameter. Evaluations report the metrics of both, "
        "those of the average as `ema_NAME`; `hpctrain checkpoint export --prefix ema/` writes it. None: off.",
    )  # fmt: skip
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Scale `lr` with global_batch / reference_batch (Goyal et al. 2017, arXiv:1706.02677).",
    )
    reference_batch: int | None = Field(None, ge=1, description="The global batch for which `lr` was chosen.")
    schedule: Literal["constant", "cosine", "step"] = Field(
        "constant", description="Learning-rate schedule after the warm-up."
    )
    schedule_target: str | None = Field(
        None, pattern=r"^[\w.]+:[\w.]+$",
        description="`module:function` instead of `schedule`: called with the steps since the warm-up and their number "
        "in all, it returns the factor of `lr`. A pure function, so that a resumed run computes the same.",
    )  # fmt: skip
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up from lr/warmup_steps to lr.")
    final_lr_fraction: float = Field(0.0, ge=0, le=1, description="`cosine` ends at this fraction of lr.")
    step_every: int | None = Field(
        None, ge=1, description="`step`: multiply lr by `step_factor` every this many steps."
    )
    step_factor: float = Field(0.1, gt=0, le=1, description="`step`: the factor.")
    max_skipped_in_row: int = Field(
        20,
        ge=0,
        description="More skipped steps in a row than this (loss or gradients that are not finite, or a loss that "
        "jumps) roll the run back or end it with code 7; see `[guards]`.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> OptimizerSection:
        if self.lr_scaling != "none" and self.reference_batch is None:
            raise ValueError(
                f"lr_scaling = {self.lr_scaling!r} needs reference_batch, the batch lr was chosen for"
            )
        if self.schedule == "step" and self.step_every is None:
            raise ValueError("schedule = 'step' needs step_every")
        if self.target is not None and (given := self.model_fields_set & OF_NAMED_OPTIMIZERS):
            raise ValueError(f"{', '.join(sorted(given))}: with target, give these in optimizer.options")
        if self.options and self.target is None:
            raise ValueError("options apply only with target: set target too, or leave options out")
        if self.schedule_target is not None and "schedule" in self.model_fields_set:
            raise ValueError("set one of schedule and schedule_target, not both")
        if self.momentum and self.name not in ("sgd", "lars"):
            raise ValueError(
                f"momentum applies only to sgd and lars: leave it out, {self.name} has betas instead"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: each must be at least 0 and below 1")
        return self


class ReductionSection(RecipeSection):
    """Reduction of gradients over the ranks."""

    algorithm: Literal[
        "auto", "flat", "ring", "direct", "hierarchical", "hierarchical-ring", "hierarchical-flat",
        "nccl-hierarchical", "nccl-torus",
    ] = Field(
        "auto",
        description="Algorithm that sums gradients; see guides/reduction.md. `auto`: chosen by measurement at the "
        "start. If an algorithm cannot run, a note names the one that runs instead.",
    )  # fmt: skip
    wire: str = Field(
        "fp32",
        description="Wire format of gradients. "
        + "".join(f"`{w.name}`: {w.description}. " for w in WIRE_FORMATS.values() if w.description)
        + f"`auto`: the faster of {' and '.join(f'`{name}`' for name in AUTO_WIRES)}.",
        json_schema_extra={"enum": [AUTO, *WIRE_FORMATS]},
    )
    bucket_mb: float | None = Field(
        None,
        gt=0,
        description="Approximate size of a bucket of gradients, MB. Absent: chosen by measurement, or 4 if nothing is "
        "measured.",
    )
    calibration: str | None = Field(
        None,
        description="A file of measurements that several runs share; it is created or extended. The run's own file is "
        "`reduction.json` in its directory.",
    )
    sync_batch_norm: bool = Field(
        False,
        description="Batch norm over the samples of all ranks; replaces the model's batch norm layers.",
    )
    schedule: ScheduleSection | None = Field(
        None,
        description="Absent: the ranks synchronise in every step. A table `[reduction.schedule]` with one of the "
        "methods below: they synchronise less often; see guides/schedules.md.",
    )

    @field_validator("wire", mode="before")
    @classmethod
    def _is_a_wire(cls, wire: object) -> object:
        """Checks the name as a `Literal` would. A `Literal` cannot have the names of wire formats that a site adds."""
        try:
            known = wire == AUTO or (isinstance(wire, str) and find_wire(wire) is not None)
        except UsageError as error:
            raise ValueError(str(error)) from error
        if not known:
            expected = listed_wires(wire_names(), mark="'")
            raise PydanticKnownError("literal_error", {"expected": expected})
        return wire


class Recipe(RecipeSection):
    """A complete recipe."""

    run: RunSection
    task: TaskSection
    data: DataSection
    optimizer: OptimizerSection = OptimizerSection()
    reduction: ReductionSection = ReductionSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    guards: GuardsSection = GuardsSection()
    limits: LimitsSection = LimitsSection()
    telemetry: TelemetrySection = TelemetrySection()
    stragglers: StragglersSection = StragglersSection()
    scaling: ScalingSection = ScalingSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if (self.run.epochs is None) == (self.run.steps is None):
            raise ValueError("run: set either epochs or steps, and only one of them")
        if self.checkpoint.keep_best is not None and (
            self.data.held_out is None or self.telemetry.evaluate_every_steps is None
        ):
            raise ValueError(
                "checkpoint.keep_best needs data.held_out and telemetry.evaluate_every_steps, which give its metric"
            )
        if self.scaling.act and self.run.ranks is not None:
            raise ValueError(
                f"scaling.act = true changes the number of ranks, and run.ranks = {self.run.ranks} forbids it: leave "
                "one of them out"
            )
        if self.scaling.act and self.slurm.elastic is not None:
            raise ValueError(
                f"scaling.act = true cannot be combined with slurm.elastic = {self.slurm.elastic!r}: an elastic run "
                "has as many ranks as its job has slots, and does not follow the advice; leave one of them out"
            )
        if self.checkpoint.signal in self.stop.signals:
            raise ValueError(
                f"{self.checkpoint.signal} is checkpoint.signal and one of stop.signals: choose another, or "
                'checkpoint.signal = "none"'
            )
        if self.run.ranks is not None:
            check_enough_samples(
                global_batch=self.data.global_batch, ranks=self.run.ranks,
                ranks_of_a_sample=self.parallel.tensor * self.parallel.pipeline,
            )  # fmt: skip
        usual = ReductionSection()
        check_parallel(
            self.parallel, optimizer=self.optimizer.name, algorithm=self.reduction.algorithm, wire=self.reduction.wire,
            changed=[key for key, value in self.reduction if value != getattr(usual, key)], ranks=self.run.ranks,
        )  # fmt: skip
        if self.parallel.pipeline > 1:
            self._check_pipeline()
        if self.reduction.schedule is not None:
            check_schedule(
                self.reduction.schedule, shard=self.parallel.shard, sync_batch_norm=self.reduction.sync_batch_norm,
                wire=self.reduction.wire, ema=self.optimizer.ema,
            )  # fmt: skip
            check_adasum(
                self.reduction.schedule, parallel=self.parallel, algorithm=self.reduction.algorithm,
                wire=self.reduction.wire,
            )  # fmt: skip
        if self.run.compile:
            self._check_compiled()
        return self

    @property
    def micro_batches(self) -> int:
        """The number of parts in which a rank computes its share of a batch."""
        return self.parallel.micro_batches if self.parallel.pipeline > 1 else self.data.micro_batches

    def _check_pipeline(self) -> None:
        """Raises ValueError if settings of other sections cannot be combined with a pipeline."""
        if self.data.micro_batches != 1:
            raise ValueError("data.micro_batches: with parallel.pipeline set parallel.micro_batches instead")
        if self.data.on_damage == "skip":
            raise ValueError("data.on_damage = 'skip' cannot be combined with parallel.pipeline: use 'stop'")
        if self.optimizer.target is not None:
            raise ValueError(
                "optimizer.target cannot be combined with parallel.pipeline: use adamw, adam or sgd"
            )

    def _check_compiled(self) -> None:
        """Raises ValueError if settings of other sections cannot be combined with `run.compile`."""
        usual = ParallelSection()
        for key in ("pipeline", "tensor", "activation_checkpointing"):
            if (value := getattr(self.parallel, key)) != getattr(usual, key):
                raise ValueError(
                    f"run.compile = true cannot be combined with parallel.{key} = {value!r}: leave one of them out"
                )
        if self.parallel.shard == "parameters":
            raise ValueError(
                "run.compile = true cannot be combined with parallel.shard = 'parameters', in which FSDP2 changes the "
                "parameters during forward: leave run.compile out, or use shard = 'optimizer' or 'gradients'"
            )
        if self.reduction.sync_batch_norm:
            raise ValueError(
                "run.compile = true cannot be combined with reduction.sync_batch_norm, which communicates in forward: "
                "leave one of them out"
            )
