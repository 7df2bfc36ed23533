"""What a rank measures of itself in a window of steps: a few numbers, robust against single slow steps. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

# Seconds of a step: waiting for data; forward, backward and optimizer, in a pipeline with waits for other stages, so
# that stages of different lengths are not taken for slow ranks; what is not named; waiting for communication; the whole
# step without an evaluation. Then the rank's samples of a step, and the seconds of writing its part of a
# checkpoint.
COLUMNS = ("input", "compute", "other", "exposed_sync", "step", "samples", "save")
INPUT, COMPUTE, OTHER, EXPOSED, STEP, SAMPLES, SAVE = range(len(COLUMNS))
NUM_OWN = 3  # columns of the rank's own work in a step: input, compute, other
NUM_PARTS = 5
_NUM_PER_STEP = SAVE


@final
class WindowTimes:
    """Collects this rank's steps until `take`.

    A time is the median of the means over NUM_PARTS successive parts of the window (median of means: Lugosi and
    Mendelson 2019, arXiv:1906.04280). So one or two hiccups do not count, but waits for data that come in every tenth
    step do.
    """

    def __init__(self) -> None:
        self._steps = array("d")
        self._saves: list[float] = []

    @property
    def num_steps(self) -> int:
        return len(self._steps) // _NUM_PER_STEP

    def add(self, seconds: Mapping[str, float], *, samples: int) -> None:
        """Adds a step. seconds: as `StepClock.lap` returns them. samples: of this rank."""
        step = seconds["step"] - seconds["evaluation"]
        own = (seconds["input"], seconds["compute"] + seconds.get("bubble", 0.0), seconds["other"])
        self._steps.extend((*own, seconds["exposed_sync"], step, samples))
        if "own_write" in seconds:
            self._saves.append(seconds["own_write"])

    def take(self) -> NDArray[np.float32]:
        """Returns the numbers of the window, shape (len(COLUMNS),), and starts the next one. At least one step."""
        steps = np.array(self._steps, dtype=np.float64).reshape(-1, _NUM_PER_STEP)
        parts = np.array_split(steps, min(NUM_PARTS, len(steps)))
        numbers = np.full(len(COLUMNS), np.nan, dtype=np.float32)
        # Not np.median: its first call imports numpy.ma, on every rank in the middle of training (0.8 MB).
        numbers[:_NUM_PER_STEP] = np.quantile([part.mean(axis=0) for part in parts], 0.5, axis=0)
        numbers[SAMPLES] = steps[:, SAMPLES].mean()
        if self._saves:
            numbers[SAVE] = sum(self._saves) / len(self._saves)
        self._steps = array("d")
        self._saves.clear()
        return numbers
