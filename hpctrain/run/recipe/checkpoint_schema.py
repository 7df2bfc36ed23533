"""The recipe's section [checkpoint]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.run.recipe.section import Section


class CheckpointSection(Section):
    """When the state is saved, and how. It is also saved at the end and when the run is asked to stop."""

    every_steps: int | None = Field(None, ge=1, description="Save every so many steps.")
    every_minutes: float | None = Field(None, gt=0, description="Save when so many minutes have passed.")
    every: Literal["auto"] | None = Field(
        None,
        description="`auto`: save at the interval that loses the least time (Young/Daly), by `failures_per_day` and "
        "what the run's checkpoints have cost so far; the first after a minute.",
    )
    failures_per_day: float | None = Field(
        None, gt=0,
        description="How often the whole job fails. With it, the interval that loses the least time is told.",
    )  # fmt: skip
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="`async`: training stands still only while its state is copied, and the copy is written in the "
        "background. Takes the rank's share of the state once more in memory.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="`async`: what a checkpoint does that is due while the one before is still being written.",
    )
    limit_mb_per_s: float | None = Field(
        None,
        gt=0,
        description="Each rank writes at most so fast, for disks that the training reads from too.",
    )
    files: int | Literal["node"] = Field(
        1,
        description="Files of a checkpoint. 1: one file. More, or `node` (one a node): a folder of them, for "
        "filesystems that dislike one file written by many nodes.",
    )
    keep: int = Field(3, ge=1, description="Checkpoints kept; older ones go once a newer one is committed.")
    keep_every: int | None = Field(
        None, ge=1, description="Besides, those whose step this divides are kept for ever."
    )
    keep_best: str | None = Field(
        None,
        description="Besides, the best one is kept: METRIC:min or METRIC:max, such as `accuracy:max`, of what the "
        "task's `metrics` returned in the newest evaluation.",
    )
    engine: Literal["auto", "direct", "mpio"] = Field(
        "auto",
        description="`mpio`: through MPI, small pieces brought together first. `direct`: every rank writes at its "
        "places.",
    )
    page_cache: Literal["auto", "use", "bypass"] = Field(
        "auto",
        description="Whether checkpoints are written through the kernel's page cache. `bypass` costs less of the "
        "processor; where the filesystem cannot, the cache is used. `auto`: bypassed on ext4 and xfs.",
    )
    recycle: bool = Field(
        True,
        description="On ext4, the room on disk of a checkpoint that is let go of is kept for the next one, which is "
        "then written faster: until the run ends one more is there than are kept, in a hidden file.",
    )
    replica_check: Literal["sampled", "full", "off"] = Field(
        "sampled",
        description="Whether a save compares the ranks' copies of parameters and optimizer state. `sampled`: one part "
        "in 64 of each tensor, 64 MiB at most, another part in each save. `full`: every byte, hashed by every rank.",
    )
    on_replica_mismatch: Literal["error", "rank0"] = Field(
        "error",
        description="What a save does where copies differ. `error`: the run ends with code 4 and nothing is saved. "
        "`rank0`: rank 0's copies are saved, with a warning.",
    )
    directory: str | None = Field(None, description="Default: `checkpoints` in the run directory.")

    local: str | None = Field(
        None, min_length=1,
        description="A directory on each node's own storage: a checkpoint is written there first, then copied to "
        "another node and into `directory` in the background, where it is committed. See guides/checkpoint-tiers.md.",
    )  # fmt: skip
    local_keep: int = Field(1, ge=1, description="`local`: so many checkpoints stay on the nodes.")
    weights_from: str | None = Field(
        None, min_length=1,
        description="A checkpoint, or a directory of some, whose weights a run starts from. A run that resumes has its "
        "own.",
    )  # fmt: skip
    weights_map: dict[str, str] = Field(
        default_factory=dict,
        description="`weights_from`: beginnings of names there, and what stands for them here, such as "
        '`{ "encoder." = "backbone." }`.',
    )
    weights_strict: bool = Field(
        True, description="`weights_from`: what does not fit is an error; `false`: it is told and left out."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CheckpointSection:
        if isinstance(self.files, int) and self.files < 1:
            raise ValueError(f'files is {self.files}: give a number from 1 on, or "node"')
        if self.local is not None and self.files not in (1, "node"):
            raise ValueError("local keeps one file a node: leave files out")
        if self.engine == "mpio" and (self.mode == "async" or self.limit_mb_per_s is not None):
            raise ValueError(
                "engine = 'mpio' writes with all ranks at once, as fast as they can: it goes neither with mode = "
                "'async' nor with limit_mb_per_s"
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
