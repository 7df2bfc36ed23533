"""How much slower computation is while reductions are under way, from measured steps on a pair of nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.scaling.model.machine import Layout
from hpctrain.scaling.model.predict import Scenario, step_of

MOST = 8.0
_HALVINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Median seconds of the steps of `layout`, without input and checkpoints. scenario: what was run."""

    scenario: Scenario
    layout: Layout
    seconds: float


def overlap_slowdown(measured: Sequence[MeasuredStep]) -> float:
    """Returns the factor on computation with which predicted steps are as long as the measured ones, 1 to `MOST`.

    Of several steps the geometric mean of predicted / measured becomes 1. By bisection: a step never becomes shorter
    by slower computation. Without steps: 1.
    """
    low, high = 0.0, math.log(MOST)
    if not measured or _too_long(measured, 1.0):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _too_long(measured, math.exp(middle)) else (middle, high)
    return math.exp(high)


def _too_long(measured: Sequence[MeasuredStep], slowdown: float) -> bool:
    ratios = [math.log(_predicted_s(one, slowdown) / one.seconds) for one in measured]
    return sum(ratios) >= 0


def _predicted_s(one: MeasuredStep, slowdown: float) -> float:
    workload = replace(one.scenario.workload, overlap_slowdown=slowdown, input_s=0.0, checkpoint_s=0.0)
    return step_of(replace(one.scenario, workload=workload), one.layout).step_s
