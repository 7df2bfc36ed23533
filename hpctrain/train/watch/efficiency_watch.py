"""Adds up where the time of all ranks goes, and records the POP efficiencies of every window of steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective, ReduceOp
from hpctrain.scaling import RECORDED, efficiency_from
from hpctrain.telemetry import RecordWriter, StepClock

# A window ends after so many steps at the latest: its maxima take 8 bytes a step.
_MOST_STEPS = 4096


@dataclass(frozen=True, slots=True)
class _Sums:
    """Over ranks and steps. values: own time, then the seconds by name of `RECORDED`. ideal_s: of each step's latest
    arrival at the reduction."""

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1 + len(RECORDED)))
    ideal_s: float = 0.0
    steps: int = 0
    samples: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.values + other.values, self.ideal_s + other.ideal_s, self.steps + other.steps,
            self.samples + other.samples,
        )  # fmt: skip

    def document(self, *, largest_s: float, num_ranks: int) -> dict[str, Any]:
        own_s, *seconds = self.values.tolist()
        return efficiency_from(
            dict(zip(RECORDED, seconds, strict=True)), own_s=own_s, largest_s=largest_s, ideal_s=self.ideal_s,
            steps=self.steps, ranks=num_ranks, samples=self.samples,
        ).document()  # fmt: skip


@final
class EfficiencyWatch:
    """Where the time of all ranks went, in windows of steps and over all steps of this start of the run (`total`).

    In a step it only notes this rank's own time, and when it arrived at the reduction: own time and bubbles after the
    one before. At the end of a window two small all-reduces take, over the ranks, the latest arrival of each step
    (which no sum can carry) and the sums of the parts, so that the result is exact whatever the number of ranks, and
    none of them has to record its steps. Rank 0 writes it.
    """

    def __init__(self, comm: Collective, *, records: RecordWriter, clock: StepClock) -> None:
        self._comm = comm
        self._records = records
        self._clock = clock
        self._after_s: float | None = None  # of the step before: own time that belongs to the next reduction
        self._arrivals_s = array("d")
        self._sums: dict[str, float] = dict.fromkeys(RECORDED, 0.0)
        self._samples = 0
        self._own_here_s = 0.0  # of this rank, since this start of the run
        self._before = _Sums()
        self.total: dict[str, Any] | None = None

    def after_step(self, step: int, seconds: Mapping[str, float], *, samples: int, window_ends: bool) -> None:
        """Adds a step. Collective if a window ends, which is at the same step on all ranks.

        seconds: of the step, by name. samples: of all ranks. The first step after a start, in which buckets and memory
        are set up, is left out.
        """
        after_s, self._after_s = self._after_s, seconds["after_sync"]
        if after_s is None:
            return
        self._arrivals_s.append(after_s + seconds["step"] - seconds["exposed_sync"] - seconds["after_sync"])
        for name in RECORDED:
            self._sums[name] += seconds.get(name, 0.0)
        self._samples += samples
        if window_ends or len(self._arrivals_s) >= _MOST_STEPS:
            self._window(step)

    def ends(self, step: int) -> None:
        """Ends the last window, after `step`, the last step of this start. Collective."""
        if self._arrivals_s:
            self._window(step)

    def _window(self, step: int) -> None:
        own_s = float(sum(self._arrivals_s)) - self._sums["bubble"]
        self._own_here_s += own_s
        largest = torch.tensor([*self._arrivals_s, own_s, self._own_here_s], dtype=torch.float64)
        sums = torch.tensor([own_s, *self._sums.values()], dtype=torch.float64)
        with self._clock.span("exposed_sync", what="sums of a window"):
            self._comm.all_reduce(largest, op=ReduceOp.MAX)
            self._comm.all_reduce(sums)
        maxima = largest.numpy()
        window = _Sums(sums.numpy(), float(maxima[:-2].sum()), len(self._arrivals_s), self._samples)
        self._before += window
        num_ranks = self._comm.num_ranks
        self.total = self._before.document(largest_s=float(maxima[-1]), num_ranks=num_ranks)
        if self._comm.rank == 0:
            found = window.document(largest_s=float(maxima[-2]), num_ranks=num_ranks)
            self._records.write({"kind": "efficiency", "time": time.time(), "step": step, **found})
        self._arrivals_s = array("d")
        self._sums = dict.fromkeys(RECORDED, 0.0)
        self._samples = 0
