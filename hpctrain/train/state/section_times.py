"""How long the sections of a run's steps take: agreed through the sums of the steps, for the time limits of waits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

from hpctrain.comm import RULES, Collective, Section, SectionLimits, in_section
from hpctrain.data import Batch
from hpctrain.telemetry import write_json

LIMITS_FILE = "limits.json"
# The limits are recorded anew when one has changed by this factor.
_RECORDED_AT_FACTOR = 1.5


@final
class SectionTimes:
    """Measures the sections of steps, and has `limits` follow from them. The same on every rank.

    A step's sum carries the times of the step before, each rank's as its share of the mean: ranks meet in every step
    and save, so that the mean is nearly the longest. limits: of this rank's waits. directory: of the run, where rank 0
    records them.
    """

    def __init__(self, limits: SectionLimits, *, comm: Collective, directory: Path) -> None:
        self.limits = limits
        self._comm = comm
        self._path = directory / LIMITS_FILE if comm.rank == 0 else None
        self._mine: dict[Section, float] = {}
        self._recorded: dict[Section, float] = {}

    def votes(self) -> dict[str, float]:
        """This rank's contributions to the sums of a step. Not collective; the same names on every rank."""
        measured = (Section.STEP, Section.INPUT, Section.SAVE)
        return {
            f"{section.value}_s": self._mine.get(section, 0.0) / self._comm.num_ranks for section in measured
        }

    def agreed(self, sums: Mapping[str, float], *, step: int) -> None:
        """Takes the times from the summed votes. Not collective."""
        for section in (Section.STEP, Section.INPUT, Section.SAVE):
            if (seconds := sums[f"{section.value}_s"]) > 0:
                self.limits.measure(section, seconds)
                self._record(section, step)
        self._mine = {}

    def step_ended(self, seconds: Mapping[str, float], *, is_usual: bool) -> None:
        """Notes what this rank has measured in a step. is_usual: the same on every rank; False for a first step, which
        compiles and fills caches: its duration does not predict later ones."""
        if is_usual:
            self._mine[Section.STEP] = seconds["step"] - seconds["checkpoint"] - seconds["evaluation"]
            self._mine[Section.INPUT] = seconds["input"]
        save_s = max(seconds["checkpoint"], seconds.get("own_write", 0.0))
        if save_s > 0:
            self._mine[Section.SAVE] = save_s

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches`, with the limit of the input for each but the first, for which an epoch is opened."""
        iterator = iter(batches)
        section: Section | None = None
        while True:
            with in_section(self._comm, section):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch
            section = Section.INPUT

    def _record(self, section: Section, step: int) -> None:
        """Writes `limits.json` when what follows from a section's slowest time has changed much."""
        slowest_s, num_measured = self.limits.slowest(section)
        if self._path is None or num_measured < RULES[section].least_measured:
            return
        seconds = self.limits.settings.derived_s(section, slowest_s=slowest_s)
        before_s = self._recorded.get(section)
        if before_s is not None and 1 / _RECORDED_AT_FACTOR < seconds / before_s < _RECORDED_AT_FACTOR:
            return
        self._recorded[section] = seconds
        found = {"time": time.time(), "step": step, "sections": self.limits.record()}
        try:
            write_json(self._path, found)
        except OSError as error:  # a full disk must not end the training
            print(f"hpctrain: {self._path} was not written: {error.strerror}", file=sys.stderr, flush=True)


def read_slowest(directory: Path) -> dict[str, float]:
    """Returns the slowest times that earlier attempts in a run directory have recorded; none if there is no record."""
    try:
        sections = json.loads((directory / LIMITS_FILE).read_text(encoding="utf-8"))["sections"]
        return {name: float(found["slowest_s"]) for name, found in sections.items() if found["slowest_s"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
