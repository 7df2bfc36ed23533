"""The time of every step on every rank divided into parts, from the records of all ranks. Pure.

A rank's own record does not say for how long it waited for slower ranks and for how long for the network. The records
of all ranks do, since a reduction ends on all of them together: the last rank to arrive waits for the network only, and
the others wait for it in addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.scaling.efficiency.pop import PARTS, RECORDED, Efficiency, efficiency_from

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Recorded seconds of all ranks.

    steps: numbers of the steps, ascending, shape (steps,). samples: of all ranks in each, shape (steps,).
    seconds: by name, those of `RECORDED`, `step` and `after_sync`, each of shape (ranks, steps).
    carried: `after_sync` of the step before each, shape (ranks, steps); 0 where it has no record.
    """

    steps: NDArray[np.int64]
    samples: NDArray[np.int64]
    seconds: Mapping[str, Times]
    carried: Times

    @property
    def num_ranks(self) -> int:
        return int(self.seconds["step"].shape[0])


def own_times(times: StepTimes) -> Times:
    """Returns each rank's time without communication from the end of a step's reduction to that of the next one.

    Shape (ranks, steps). Of a step without the record of the one before it, from its begin.
    """
    return _arrivals(times) - times.seconds["bubble"]


def _arrivals(times: StepTimes) -> Times:
    """Returns when each rank arrives at a step's reduction, from the end of the one before: own time and bubbles."""
    seconds = times.seconds
    return seconds["step"] - seconds["exposed_sync"] - seconds["after_sync"] + times.carried


def attribute(times: StepTimes) -> Times:
    """Returns the seconds of every part of every step on every rank, shape (ranks, steps, parts), in order of `PARTS`.

    They add up to the step.
    """
    seconds = times.seconds
    arrivals = _arrivals(times)
    waiting = np.minimum(arrivals.max(axis=0) - arrivals, seconds["exposed_sync"])
    hidden = np.minimum(seconds["hidden_sync"], seconds["compute"])
    parts = {
        **seconds,
        "compute": seconds["compute"] - hidden,
        "hidden_reduction": hidden,
        "exposed_reduction": seconds["exposed_sync"] - waiting,
        "waiting": waiting,
    }
    return np.stack([parts[name] for name in PARTS], axis=-1)


def efficiency_of(times: StepTimes) -> Efficiency:
    """Returns the POP efficiencies of these steps. At least one step."""
    own = own_times(times)
    return efficiency_from(
        {name: float(times.seconds[name].sum()) for name in RECORDED},
        own_s=float(own.sum()),
        largest_s=float(own.sum(axis=1).max()),
        ideal_s=float(_arrivals(times).max(axis=0).sum()),
        steps=len(times.steps),
        ranks=times.num_ranks,
        samples=int(times.samples.sum()),
    )


def document_of(times: StepTimes) -> dict[str, Any]:
    """Returns the efficiency of these steps with the parts of each rank, seconds in a step, as JSON."""
    by_rank = attribute(times).mean(axis=1)
    ranks = [dict(zip(PARTS, row.tolist(), strict=True)) for row in by_rank]
    first, last = int(times.steps[0]), int(times.steps[-1])
    return {"first_step": first, "last_step": last, **efficiency_of(times).document(), "by_rank": ranks}
