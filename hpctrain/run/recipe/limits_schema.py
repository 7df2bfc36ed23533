"""Section [limits] of the recipe."""

from __future__ import annotations

from pydantic import Field

from hpctrain.run.recipe.section import Section


class LimitsSection(Section):
    """Time limits of the parts of a run, for a rank that waits for others; see runbooks/f3-hang-or-lost-rank.md."""

    derive: bool = Field(
        True,
        description="End the run when a rank is found hung before `run.timeout_s` is over: when others have waited for "
        "it longer than 10 times the slowest step, input or save of this run, and its process is stopped, has ended or "
        "uses no processor.",
    )
    least_s: float = Field(
        60.0, gt=0,
        description="No shorter limit is derived for a step; for input and saves not less than five times this, s.",
    )  # fmt: skip
    start_s: float | None = Field(
        None, gt=0, description="Limit of a wait before training begins, s. Absent: `run.timeout_s`."
    )  # fmt: skip
    step_s: float | None = Field(
        None, gt=0,
        description="Limit of a wait in a step, in which other ranks may still read their batch, s. Like `input_s`, "
        "`save_s` and `load_s` it replaces `run.timeout_s` and what is derived.",
    )  # fmt: skip
    input_s: float | None = Field(
        None,
        gt=0,
        description="Limit of a wait between two steps, for a batch, s; also where no other rank waits.",
    )
    save_s: float | None = Field(None, gt=0, description="Limit of a wait while a checkpoint is saved, s.")
    load_s: float | None = Field(None, gt=0, description="Limit of a wait while a checkpoint is loaded, s.")
