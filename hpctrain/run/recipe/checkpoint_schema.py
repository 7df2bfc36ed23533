"""Section [checkpoint] of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.resilience import SignalName
from hpctrain.run.recipe.section import Section


class CheckpointSection(Section):
    """When the state is saved, and how. It is also saved at the end and when the run is asked to stop."""

    every_steps: int | None = Field(None, ge=1, description="Steps between saves.")
    every_minutes: float | None = Field(None, gt=0, description="Save when this many minutes have passed.")
    every: Literal["auto"] | None = Field(
        None,
        description="`auto`: save at the interval that loses the least time (Young/Daly), computed from "
        "`failures_per_day` and the cost of the run's checkpoints so far; the first save is after a minute.",
    )
    failures_per_day: float | None = Field(
        None, gt=0,
        description="How often the whole job fails. If set, the interval that loses the least time is printed.",
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
    recycle: bool = Field(
        True,
        description="On ext4, keep the disk blocks of a deleted checkpoint for the next one, which is then written "
        "faster. Takes the disk space of one more checkpoint, in a hidden file, until the run ends.",
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
        description="`weights_from`: a tensor that does not fit is an error; `false`: it is reported and left out.",
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
            raise ValueError("page_cache = 'bypass' belongs to engine = 'direct' or 'auto'")
        if self.weights_from is None and (self.weights_map or not self.weights_strict):
            raise ValueError("weights_map and weights_strict belong to weights_from")
        if self.every is not None and self.failures_per_day is None:
            raise ValueError("every = 'auto' needs failures_per_day: how often the whole job fails")
        if self.every is not None and self.every_minutes is not None:
            raise ValueError("every = 'auto' and every_minutes: leave one of the two out")
        if self.when_busy == "skip" and self.mode == "sync":
            raise ValueError("when_busy = 'skip' belongs to mode = 'async'")
        if self.keep_best is not None and not self.keep_best.strip(":").endswith((":min", ":max")):
            raise ValueError(
                f"keep_best is {self.keep_best!r}: write METRIC:min or METRIC:max, such as accuracy:max"
            )
        return self
