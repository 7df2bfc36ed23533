"""Section [guards] of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.run.recipe.section import Section

DEFAULT_JUMP_Z = 20.0


class GuardsSection(Section):
    """What a run does when it diverges or runs out of memory; see runbooks/f5-divergence.md and f6-out-of-memory.md."""

    loss_jump_z: float | None = Field(
        None,
        ge=0,
        description="A step whose loss is at least so many robust standard deviations (from the median absolute "
        "deviation; of the logarithm, if all losses are positive) above the recent losses is skipped on all ranks. 0: "
        "off. Absent: 20, or 0 with `data.order` = `sequential`, where neighbouring samples may be alike.",
    )
    loss_window: int = Field(
        100, ge=10, description="Number of recent losses; before there are so many, no loss is a jump."
    )
    max_roll_backs: int = Field(
        3,
        ge=0,
        description="More than `optimizer.max_skipped_in_row` skipped steps in a row roll the run back to a checkpoint "
        "from before, at most so often in the whole run; then it ends with code 7.",
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
        "settings of their optimizers (learning rate). `error`: a difference ends the run with code 4, and names "
        "tensors and ranks. `note`: it is said once, and the run continues. `off`: nothing is compared. Absent: "
        "`error`, or `note` with `checkpoint.on_replica_mismatch` = `rank0`.",
    )
