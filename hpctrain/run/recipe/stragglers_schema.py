"""Section [stragglers] of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.run.recipe.section import Section


class StragglersSection(Section):
    """Ranks, nodes and links that are slower than the others: how they are found; see guides/stragglers.md."""

    find: bool = Field(
        True,
        description="Compare the ranks' own times while training, and name a slow rank with its probable cause. "
        "Nothing is compared on one rank.",
    )
    window_s: float = Field(
        10.0, gt=0, description="Time between comparisons, s; at least five steps, however long they take."
    )
    windows: int = Field(
        3,
        ge=1,
        description="Comparisons in a row that must agree before a rank is named, and before its end is; more where "
        "single ones often stand out.",
    )
    min_excess: float = Field(
        0.1,
        gt=0,
        description="A rank is slow if its own work exceeds the median of the ranks by this share of a step. The "
        "excess must also be more than three robust deviations, and 2 ms.",
    )
    probe: Literal["off", "when-slow", "start"] = Field(
        "when-slow",
        description="Measuring of the links between nodes. `when-slow`: for a moment after the first comparison, and "
        "when communication has become slower. `start`: also before training, all pairs of nodes, and each rank's "
        "memory and arithmetic; the results are in `probe.json`.",
    )
