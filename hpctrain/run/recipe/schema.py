"""One TOML file is one run. The recipe is a frozen value, validated before anything communicates.

The descriptions of the fields are the user's reference: `docs/recipe.md` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hpctrain.run.device import DEVICE_NAMES
from hpctrain.run.recipe.checkpoint_schema import CheckpointSection
from hpctrain.run.recipe.section import Section


class RunSection(Section):
    """What kind of run this is, and where it leaves its files."""

    directory: str = Field(description="Run directory: records, metrics, checkpoints. Shared by all nodes.")
    name: str = Field("run", min_length=1, description="A name for the tables.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of model initialisation and sample order.")
    epochs: int | None = Field(
        None, ge=1, description="Train this many passes over the data. This or `steps`."
    )
    steps: int | None = Field(None, ge=1, description="Train this many optimizer steps. This or `epochs`.")
    ranks: int | None = Field(
        None, ge=1, description="Number of ranks that the run insists on; another number is refused at start."
    )
    backend: Literal["auto", "horovod", "mpi", "serial"] = Field(
        "auto",
        description="Communication backend. `auto`: MPI; with GPUs Horovod for the gradients, where it is built with "
        "NCCL. `horovod`: its all-reduce for the algorithms flat and hierarchical-flat and NCCL's, MPI for the rest.",
    )
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = Field(
        "fp32",
        description="`fp32`, `fp64`: dtype of the model. `bf16`, `fp16`: a float32 model, autocast around forward. "
        "Floating-point fields of a batch are handed to the task in the model's dtype.",
    )
    device: str = Field(
        "auto",
        pattern=rf"^({DEVICE_NAMES})$",
        description="`auto`: CUDA where every rank has a device of its own, else the CPU on all ranks. `cuda`: "
        "a device of its own, or an error. `cuda:0`: the first one of each machine, which its ranks share; not over "
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
        description="A collective operation that takes longer ends the run with code 6: all ranks have ended by then, "
        "so they give up a quarter of it before, at most 5 s.",
    )
    deterministic: bool = Field(
        True, description="Ask torch for deterministic algorithms, so that a resumed run gives the same bits."
    )


class TaskSection(Section):
    """What is trained."""

    target: str = Field(
        pattern=r"^[\w.]+:[\w.]+$",
        description="`module:Class` of the task. The recipe's folder and the working directory are searched too.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")


class DataSection(Section):
    """What it is trained on."""

    train: str = Field(description="Dataset directory made by `hpctrain data pack`.")
    held_out: str | None = Field(None, description="Dataset directory for evaluation.")
    global_batch: int = Field(ge=1, description="Samples per optimizer step, over all ranks.")
    micro_batches: int = Field(
        1,
        ge=1,
        description="Parts in which a rank computes its share of the batch; traffic only after the last.",
    )
    order: Literal["shuffle", "blocks", "sequential", "weighted", "stratified"] | None = Field(
        None,
        description="Which sample when, see guides/data-order.md. `shuffle`: all, anew each epoch. `blocks`: shuffled "
        "blocks, mixed within `order_window` of them: large reads. `sequential`: as stored. `weighted`: drawn with "
        "replacement by `weights`. `stratified`: all, each batch with the classes of `strata` in the dataset's "
        "proportions. Absent: as `shuffle` says.",
    )
    order_block: int | None = Field(
        None, ge=1, description="`blocks`: samples in a block. Absent: as many as take 4 MiB."
    )
    order_window: int = Field(64, ge=1, description="`blocks`: so many blocks are mixed with each other.")
    weights: str | None = Field(
        None, min_length=1,
        description="`weighted`: a field with one number a sample, or a .npy file of them; an epoch draws as many "
        "samples as the dataset has.",
    )  # fmt: skip
    strata: str | None = Field(
        None, min_length=1,
        description="`stratified`: a field with one whole number (the class) a sample, or a .npy file of them.",
    )  # fmt: skip
    shuffle: bool = Field(
        True, description="Short for `order`: `true` is `shuffle`, `false` is `sequential`."
    )
    last_batch: Literal["keep", "drop", "pad"] = Field(
        "keep",
        description="What happens to the last, smaller batch of an epoch. `pad`: it is filled by repeating its own "
        "samples, which weigh nothing in the loss.",
    )
    io: Literal["auto", "map", "read", "collective"] = Field(
        "auto",
        description="How training data are read. `map`: copied from memory maps. `read`: read at their places in the "
        "files; an error of the disk is told. `collective`: all ranks together, by MPI-IO. `auto`: `map` for local "
        "files that fit into `cache_mb`, else `read`.",
    )
    cache_mb: float | None = Field(
        None, ge=0,
        description="Memory bound of a rank's cache of decoded chunks, and of files mapped with `auto`, MB. Absent: "
        "64 MiB of chunks, and files up to a quarter of the node's memory.",
    )  # fmt: skip
    prefetch_mb: float = Field(64.0, gt=0, description="Memory bound of prefetched batches per rank, MB.")
    check: Literal["off", "first-epoch", "always"] = Field(
        "off",
        description="Compare what is read with its hashes: never, each block once per start, or at every read.",
    )
    on_damage: Literal["stop", "skip"] = Field(
        "stop",
        description="What a damaged block that `check` finds does: end the run, or leave its samples out of the "
        "batches, counted in the metrics and the summary.",
    )
    transform: str | None = Field(
        None, pattern=r"^[\w.]+:[\w.]+$",
        description="`module:function` that makes a training batch's arrays from those that were read, found as the "
        "task is.",
    )  # fmt: skip
    held_out_transform: str | None = Field(
        None, pattern=r"^[\w.]+:[\w.]+$", description="The same for held-out batches. Absent: they stay as read."
    )  # fmt: skip
    workers: int = Field(
        0, ge=0,
        description="Processes of each rank that run `transform`, for Python that holds the interpreter. 0: in the "
        "threads that read.",
    )  # fmt: skip
    stage: str | None = Field(
        None, min_length=1,
        description="A directory on each node's own storage: training shards are copied there in the background, "
        "compared with their hashes, and read from there. What a run leaves there the next one removes.",
    )  # fmt: skip
    stage_gb: float = Field(100.0, gt=0, description="What the copies on a node may take, GB.")
    memory_store: bool = Field(
        False,
        description="Read the training data once, into the memory of all ranks together, and take every sample from "
        "there by MPI's one-sided reads.",
    )
    evaluation_batch: int = Field(1024, ge=1, description="Samples per evaluation batch, over all ranks.")
    evaluation_samples: int | None = Field(
        None, ge=1,
        description="Evaluate on so many held-out samples, always the same ones, drawn from all; rounded up to whole "
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
            raise ValueError("io = 'collective' goes with check = 'off' and without memory_store")
        if self.stage is not None and (self.io == "collective" or self.memory_store):
            raise ValueError("stage goes neither with io = 'collective' nor with memory_store")
        if self.workers and self.transform is None:
            raise ValueError("workers run a transform: set transform, or leave workers out")
        for key, order in (("weights", "weighted"), ("strata", "stratified")):
            if (getattr(self, key) is not None) != (self.chosen_order == order):
                raise ValueError(f"{key} and order = {order!r} belong together: set both or neither")
        return self


class OptimizerSection(Section):
    """How parameters move."""

    name: Literal["sgd", "adam", "adamw"] = Field("adamw", description="Optimizer of torch.optim.")
    lr: float = Field(1e-3, gt=0, description="Base learning rate, for a global batch of `reference_batch`.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of `sgd`.")
    betas: list[float] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="Betas of `adam`, `adamw`."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    clip_norm: float | None = Field(
        None, gt=0, description="Clip the global gradient norm to this. None: off."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Scale `lr` with global_batch / reference_batch (Goyal et al. 2017, arXiv:1706.02677).",
    )
    reference_batch: int | None = Field(None, ge=1, description="The global batch for which `lr` was chosen.")
    schedule: Literal["constant", "cosine", "step"] = Field("constant", description="After the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up from lr/warmup_steps to lr.")
    final_lr_fraction: float = Field(0.0, ge=0, le=1, description="`cosine` ends at this fraction of lr.")
    step_every: int | None = Field(
        None, ge=1, description="`step`: multiply lr by `step_factor` so often, in steps."
    )
    step_factor: float = Field(0.1, gt=0, le=1, description="`step`: the factor.")
    max_skipped_in_row: int = Field(
        20,
        ge=0,
        description="More skipped steps in a row than this (gradients not finite) end the run, code 7.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> OptimizerSection:
        if self.lr_scaling != "none" and self.reference_batch is None:
            raise ValueError(
                f"lr_scaling = {self.lr_scaling!r} needs reference_batch, the batch lr was chosen for"
            )
        if self.schedule == "step" and self.step_every is None:
            raise ValueError("schedule = 'step' needs step_every")
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum belongs to sgd; {self.name} has betas")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: each must be at least 0 and below 1")
        return self


class ReductionSection(Section):
    """How gradients cross the network."""

    algorithm: Literal[
        "auto", "flat", "ring", "direct", "hierarchical", "hierarchical-ring", "hierarchical-flat",
        "nccl-hierarchical", "nccl-torus",
    ] = Field(
        "auto",
        description="How gradients are summed; see guides/reduction.md. `auto`: by measurement at the start, for "
        "each size of bucket. Where an algorithm cannot run, a note says which one runs instead.",
    )  # fmt: skip
    wire: Literal["auto", "fp32", "fp16", "bf16", "int8", "top-k", "low-rank"] = Field(
        "fp32",
        description="What is sent of a gradient. `fp16`: two bytes, scaled, with overflowed steps skipped on all "
        "ranks. `bf16`: two bytes. `int8`: one, with a scale for 256 and error feedback. `top-k`: the largest 1 % with "
        "error feedback. `low-rank`: PowerSGD with error feedback. `auto`: the faster of `fp32` and `fp16`.",
    )
    bucket_mb: float | None = Field(
        None,
        gt=0,
        description="Gradients are sent in buckets of about this many MB. Absent: as measured, or 4 where nothing is.",
    )
    calibration: str | None = Field(
        None,
        description="A file of measurements that several runs share; made or added to. The run's own file is "
        "`reduction.json` in its directory.",
    )
    sync_batch_norm: bool = Field(
        False,
        description="Batch norm over the samples of all ranks: its layers in the model are replaced by ours.",
    )


class TelemetrySection(Section):
    """What the run tells."""

    progress_every_s: float = Field(5.0, gt=0, description="How often rank 0 tells its progress, s.")
    metrics_every_steps: int = Field(1, ge=1, description="A metrics record per rank every so many steps.")
    evaluate_every_steps: int | None = Field(
        None, ge=1, description="Evaluate on held-out data so often. It is always done at the end."
    )


class Recipe(Section):
    """The whole run."""

    run: RunSection
    task: TaskSection
    data: DataSection
    optimizer: OptimizerSection = OptimizerSection()
    reduction: ReductionSection = ReductionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if (self.run.epochs is None) == (self.run.steps is None):
            raise ValueError("run: set one of epochs and steps, not both and not neither")
        if self.checkpoint.keep_best is not None and (
            self.data.held_out is None or self.telemetry.evaluate_every_steps is None
        ):
            raise ValueError(
                "checkpoint.keep_best needs data.held_out and telemetry.evaluate_every_steps, where its metric is from"
            )
        if self.run.ranks is not None and self.data.global_batch < self.run.ranks:
            raise ValueError(
                f"data.global_batch = {self.data.global_batch} cannot be split over run.ranks = {self.run.ranks}: "
                "every rank needs at least one sample"
            )
        return self
