"""When the last bucket is reduced: a recurrence of maxima and sums over the buckets of a step. Pure.

Of a max-plus system (Baccelli, Cohen, Olsder and Quadrat 1992, Synchronization and Linearity): a reduction begins
when its bucket is ready, the one before it has left the resource that both need most, and no more than `in_flight`
are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.scaling.model.costs import Cost

IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """end_s: of the last reduction, after the begin of backward. busy_s: for which any reduction was under way."""

    end_s: float
    busy_s: float


def reduce_during(ready_s: Sequence[float], costs: Sequence[Cost], *, in_flight: int = IN_FLIGHT) -> Overlap:
    """Returns the end of the reductions of buckets that are ready at `ready_s`, in this order."""
    free_s = 0.0
    ends: list[float] = []
    busy_s, busy_until = 0.0, 0.0
    for number, (ready, cost) in enumerate(zip(ready_s, costs, strict=True)):
        begin = max(ready, free_s, ends[number - in_flight] if number >= in_flight else 0.0)
        occupied = cost.occupied_s if in_flight > 1 else cost.total_s
        free_s = begin + occupied
        # Reductions end in the order in which they began, as they share their resources.
        ends.append(max(begin + cost.total_s, ends[-1] if ends else 0.0))
        busy_s += max(0.0, ends[-1] - max(begin, busy_until))
        busy_until = ends[-1]
    return Overlap(end_s=ends[-1] if ends else 0.0, busy_s=busy_s)


def reduce_fused(
    ready_s: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], Cost],
    *,
    fusion_bytes: float,
    cycle_s: float,
) -> Overlap:
    """As `reduce_during`, for Horovod: once in each cycle all gradients that are ready are joined, up to
    `fusion_bytes`.

    One reduction at a time; a larger gradient travels alone. Source: Horovod's Tensor Fusion, docs/tensor-fusion.rst.
    """
    now = busy_s = 0.0
    place = 0
    while place < len(sizes):
        now = max(now, ready_s[place])
        now = cycle_s * -(-now // cycle_s) if cycle_s > 0 else now
        end, joined = place, 0.0
        while (
            end < len(sizes) and ready_s[end] <= now and (end == place or joined + sizes[end] <= fusion_bytes)
        ):
            joined += sizes[end]
            end += 1
        seconds = cost(joined).total_s
        now, busy_s, place = now + seconds, busy_s + seconds, end
    return Overlap(end_s=now, busy_s=busy_s)
