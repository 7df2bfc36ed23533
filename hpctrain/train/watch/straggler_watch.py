"""Finds slow ranks and links while training: windows of steps, their comparison, and what is reported of it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import World
from hpctrain.stragglers import (
    COLUMNS,
    NUM_OWN,
    Cause,
    Change,
    Limits,
    Links,
    LinkWatch,
    SlowRanks,
    WindowTimes,
    lines_of,
    lower_median,
    measure_links,
)
from hpctrain.telemetry import RecordWriter, StepClock, write_json
from hpctrain.topology import Topology

SLOW_FILE = "slow.json"
WINDOW_ENDS = "window_ends"  # the name of rank 0's vote that a window ends with this step
# A window has at least so many steps, however long they take.
LEAST_STEPS = 5
# The summary lists so many findings of a run; the records have all.
MOST_LISTED = 100


@final
class StragglerWatch:
    """Compares the ranks after every window of steps. Rank 0 judges, and reports what has changed.

    Rank 0 says through the sums of a step when a window ends and when the links between nodes are to be measured
    (`votes`), so that all ranks do it after the same step. A window ends with an all-gather of 28 bytes from each rank.
    window_s: shortest time of a window. probes: measure the links when communication has become slow. before: the links
    at the start of the run, if they were measured. directory: of the run, where `slow.json` says what is slow now.
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        window_s: float,
        limits: Limits,
        probes: bool,
        directory: Path,
        records: RecordWriter,
        say: Callable[[str], None],
        clock: StepClock,
        before: Links | None = None,
    ) -> None:
        self._world = world
        self._topology = topology
        self._window_s = window_s
        self._directory = directory
        self._records = records
        self._say = say
        self._clock = clock
        self._ranks = SlowRanks(topology, limits=limits)
        self._links = LinkWatch(topology, limits=limits, before=before)
        self._probes = probes and topology.num_nodes > 1
        self._times = WindowTimes()
        self._lengths: deque[int] = deque(maxlen=limits.windows)  # steps of the last windows
        self._begun_s = time.monotonic()
        self._wants_probe = False
        self._num_saves = 0
        self.found: list[dict[str, Any]] = []  # what was slow in this run, for the summary; on rank 0

    def votes(self) -> dict[str, float]:
        """This rank's contributions to the sums of a step; only rank 0's are not 0. Not collective."""
        if self._world.rank != 0:
            return {WINDOW_ENDS: 0.0, "probe_links": 0.0}
        over = time.monotonic() - self._begun_s >= self._window_s
        return {
            WINDOW_ENDS: float(over and self._times.num_steps >= LEAST_STEPS - 1),
            "probe_links": float(self._wants_probe),
        }

    def after_step(
        self, step: int, seconds: Mapping[str, float], *, samples: int, sums: Mapping[str, float]
    ) -> None:
        """Adds a step of this rank, and compares the ranks if that was agreed on. Collective.

        seconds: of the step, by name. sums: the summed votes.
        """
        self._times.add(seconds, samples=samples)
        self._num_saves += "own_write" in seconds
        if sums[WINDOW_ENDS] > 0:
            self._compare(step)
        if sums["probe_links"] > 0:
            self._probe(step)

    # ------------------------------------------------------------------ details

    def _compare(self, step: int) -> None:
        num_steps, num_saves = self._times.num_steps, self._num_saves
        mine = torch.from_numpy(self._times.take())
        with self._clock.span("exposed_sync"):
            every = self._world.all_gather(mine, counts=[len(COLUMNS)] * self._world.num_ranks)
        self._begun_s, self._num_saves = time.monotonic(), 0
        if self._world.rank != 0:
            return
        numbers = every.numpy().reshape(-1, len(COLUMNS)).astype(np.float64)
        usual = dict(zip(COLUMNS, lower_median(numbers).tolist(), strict=True))
        floor_s = float(numbers[:, COLUMNS.index("exposed_sync")].min())
        largest = numbers.argmax(axis=0).tolist()
        self._records.write({
            "kind": "ranks", "time": time.time(), "step": step, "steps": num_steps, "step_s": usual["step"],
            "communication_s": floor_s,
            "seconds": {
                name: {"median": usual[name], "largest": float(numbers[largest[c], c]), "rank": largest[c]}
                for c, name in enumerate(COLUMNS[:NUM_OWN])
            },
        })  # fmt: skip
        self._lengths.append(num_steps)
        changes = self._ranks.observe(numbers)
        saves = [change for change in changes if change.slow.cause is Cause.CHECKPOINT]
        self._report(
            step, [c for c in changes if c not in saves], over=f"the last {sum(self._lengths)} steps"
        )
        self._report(step, saves, over="the last save" if num_saves == 1 else f"the last {num_saves} saves")
        self._wants_probe = self._probes and self._links.wants_probe(floor_s=floor_s, step_s=usual["step"])

    def _probe(self, step: int) -> None:
        self._wants_probe = False
        with self._clock.span("exposed_sync"):
            links = measure_links(self._world, self._topology, thorough=False)
        if links is None:
            self._probes = False
            return
        if self._world.rank != 0:
            return
        self._records.write({
            "kind": "probe", "time": time.time(), "step": step, "seconds": links.seconds,
            "bytes_per_s": [min(n.bytes_per_s for n in links.nodes), max(n.bytes_per_s for n in links.nodes)],
        })  # fmt: skip
        self._report(step, self._links.probed(links), over="")

    def _report(self, step: int, changes: list[Change], *, over: str) -> None:
        for line in lines_of(changes, over=over):
            self._say(line)
        for change in changes:
            what = {**asdict(change.slow), "cause": change.slow.cause.value}
            kind = "slow_ended" if change.ended else "slow"
            self._records.write({"kind": kind, "time": time.time(), "step": step, **what})
            if not change.ended:
                self.found.append({**what, "from_step": step, "to_step": None})
                del self.found[:-MOST_LISTED]
                continue
            for entry in self.found:
                same = (entry["ranks"], entry["cause"]) == (what["ranks"], what["cause"])
                if same and entry["to_step"] is None:
                    entry["to_step"] = step
        if changes:
            self._write_slow(step)

    def _write_slow(self, step: int) -> None:
        """Writes what is slow now. A full disk is reported and does not end the run."""
        slow = [*self._ranks.named, *self._links.named]
        found = {
            "time": time.time(), "step": step,
            "slow_nodes": sorted({s.nodes[0] for s in slow if len(s.nodes) == 1}),
            "slow": [{**asdict(s), "cause": s.cause.value} for s in slow],
        }  # fmt: skip
        path = self._directory / SLOW_FILE
        try:
            write_json(path, found)
        except OSError as error:
            print(f"hpctrain: {path} was not written: {error.strerror}", file=sys.stderr, flush=True)
