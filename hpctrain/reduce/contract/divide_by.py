"""What gradients are divided by when the weights of a step do not add up to 1, such as numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpctrain.errors import UsageError

# Wire formats with error feedback: what they do not send is added to the gradients of the next step.
FED_BACK_WIRES = ("int8", "top-k", "low-rank")


def check_divide_by(
    divide_by: str | None, *, sums: Mapping[str, float] | None, plain: bool, wire: str | None = None
) -> None:
    """Raises UsageError unless `divide_by` is None or a name in `sums` that can be used.

    plain: a backward of this step ran outside the updater, which has weighted it equally on all ranks. wire: the wire
    format; with error feedback, what it does not send in a step would be divided by the sum of the next step. None: the
    weights of each step add up to about 1.
    """
    if divide_by is None:
        return
    if divide_by not in (sums or {}):
        raise UsageError(
            f"step(divide_by={divide_by!r}) needs a number of that name in sums, which has {sorted(sums or {})}"
        )
    if plain:
        raise UsageError(
            f"step(divide_by={divide_by!r}) after a plain loss.backward(), which weights all ranks equally: call "
            "updater.backward(loss, weight=...) with the weights that sums adds up"
        )
    if wire in FED_BACK_WIRES:
        raise UsageError(
            f"step(divide_by={divide_by!r}) with wire={wire!r}: what this wire format does not send is added to the "
            "gradients of the next step, and would be divided by that step's sum of weights. Divide the weights before "
            "backward instead, with `mine` the sum of this rank's weights over the micro-batches of the step: "
            "total = session.all_reduce({'weight': mine})['weight']; updater.backward(loss, weight=weight / total); "
            "updater.step() without divide_by. Or use wire='fp32', 'fp16' or 'bf16'"
        )


def divisor(totals: Mapping[str, float], *, divide_by: str | None) -> float:
    """Returns the sum over the ranks of the number `divide_by`, or 1. With 0 the step cannot be applied.

    Raises UsageError, on all ranks as `totals` are the same, if it is negative or not finite.
    """
    total = 1.0 if divide_by is None else totals[divide_by]
    if not 0 <= total < math.inf:
        raise UsageError(
            f"the sum over the ranks of {divide_by!r}, by which step divides the gradients, is {total:g}: weights are "
            "finite numbers, 0 or more",
            agreed=True,
        )
    return total
