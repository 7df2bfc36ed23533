"""The mean loss of a step, from its sums over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

# Among the sums of a step, if the task weighs its losses: see `LossWeights.total`.
LOSS_WEIGHT = "loss_weight"


def with_mean_loss(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of a step with the mean in place of the sum under "loss"; 0 if nothing was counted."""
    weight = sums.get(LOSS_WEIGHT)
    if weight is None:
        return dict(sums)
    return {**sums, "loss": sums["loss"] / weight if weight else 0.0}
