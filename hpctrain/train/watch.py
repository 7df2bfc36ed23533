"""Watches the steps of a run on all ranks: slow ranks, data that are not finite, efficiency and traces."""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective, ReduceOp, World, all_gather_json, make_shared_folder
from hpctrain.data import Batch
from hpctrain.errors import LaunchError
from hpctrain.reduce import DistributedOptimizer
from hpctrain.scaling import TRACE_FOLDER, efficiency_from, measure_clock_offset
from hpctrain.stragglers import (
    COLUMNS,
    NUM_OWN,
    Change,
    Links,
    LinkWatch,
    SlowCause,
    SlowRankLimits,
    SlowRanks,
    WindowTimes,
    lines_of,
    lower_median,
    measure_links,
)
from hpctrain.telemetry import PART_KEYS, RecordWriter, StepClock, write_json
from hpctrain.topology import Topology

# Finds slow ranks and links while training: windows of steps, their comparison, and what is reported of it.


SLOW_FILE = "slow.json"
WINDOW_ENDS = "window_ends"  # the name of rank 0's vote that a window ends with this step
_PROBES = "probe_links"  # the name of rank 0's vote that the links are measured after this step
# In place of the votes of a step that has none.
NO_COMPARISON = {WINDOW_ENDS: 0.0, _PROBES: 0.0}
# The smallest number of steps in a window, however long they take.
LEAST_STEPS = 5
# The largest number of findings in the summary; the records have all.
MOST_LISTED = 100


@final
class StragglerWatch:
    """Compares the speeds of the ranks after every window of steps. Rank 0 decides what is slow, and reports changes.

    Rank 0 announces through the sums of a step (`votes`) that a window ends, or that the links between nodes are to be
    measured. So all ranks do this after the same step. A window ends with an all-gather of 28 bytes from each rank.

    Args:
        window_s: The shortest duration of a window, in seconds.
        limits: The limits for reporting ranks as slow.
        probes: True to measure the links when communication has become slow.
        before: The links as measured at the start of the run; None if links were not measured.
        directory: The run directory. Its file `slow.json` lists what is slow now.
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        window_s: float,
        limits: SlowRankLimits,
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
        """Returns the numbers that this rank adds to the sums of a step, by name. Not collective.

        The numbers are 0 on all ranks except rank 0.
        """
        if self._world.rank != 0:
            return NO_COMPARISON
        over = time.monotonic() - self._begun_s >= self._window_s
        return {
            WINDOW_ENDS: float(over and self._times.num_steps >= LEAST_STEPS - 1),
            _PROBES: float(self._wants_probe),
        }

    def after_step(
        self, step: int, seconds: Mapping[str, float], *, samples: int, sums: Mapping[str, float]
    ) -> None:
        """Adds a step of this rank. Compares the ranks if rank 0 has announced a comparison. Collective.

        seconds: the seconds of the step, by name.
        samples: the number of this rank's samples.
        sums: the votes, summed over the ranks.
        """
        self._times.add(seconds, samples=samples)
        self._num_saves += "own_write" in seconds
        if sums[WINDOW_ENDS] > 0:
            self._compare(step)
        if sums[_PROBES] > 0:
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
        saves = [change for change in changes if change.slow.cause is SlowCause.CHECKPOINT]
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
        """Writes what is slow now to `slow.json`. A full disk is reported and does not end the run."""
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


# Which samples of a dropped step hold NaN or infinity: usually they are why it was dropped.


_MAX_SAID = 5
_MAX_SAMPLES = 4  # per field and rank


@final
class DataFaults:
    """Finds samples with NaN or infinity in the batches of dropped steps.

    say: function that prints a line for the user, on rank 0.
    """

    def __init__(self, *, comm: Collective, say: Callable[[str], None]) -> None:
        self._comm = comm
        self._say = say
        self._num_said = 0

    def after_dropped(self, step: int, batch: Batch) -> None:
        """Reports the samples that are not finite in the batch of a dropped step. Collective.

        Only the first few steps with such samples are reported.
        """
        found = self.describe(batch)
        if found and self._num_said < _MAX_SAID:
            self._num_said += 1
            self._say(f"step {step} is skipped on all ranks: its data are not finite: {found}")

    def describe(self, batch: Batch) -> str:
        """Returns a text that names the fields and samples, on all ranks, that are not finite. Collective.

        The text is empty if all samples are finite. A sample is named by its index in the dataset, if the index is
        known.

        batch: this rank's part of the global batch.
        """
        everyones = all_gather_json(self._comm, list(_faults(batch.real())))
        by_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(everyones):
            for text in texts:
                by_text.setdefault(text, []).append(rank)
        return "; ".join(f"{text} on rank {ranks[0]}" for text, ranks in by_text.items())


def _faults(batch: Batch) -> Iterator[str]:
    for name, tensor in batch.fields.items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        bad = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
        rows = bad.nonzero().flatten().tolist()
        if rows:
            which = (
                [int(batch.indices[row]) for row in rows[:_MAX_SAMPLES]] if batch.indices is not None else []
            )
            more = f" and {len(rows) - len(which)} more" if len(rows) > len(which) else ""
            samples = (
                f"sample{'s' if len(rows) > 1 else ''} {', '.join(map(str, which))}{more}"
                if which
                else f"{len(rows)} samples"
            )
            yield f"field {name!r}, {samples}"


# Adds up how all ranks spend their time, and records the POP efficiencies of every window of steps.


# The largest number of steps in a window, whose maxima take 8 bytes per step.
_MOST_STEPS = 4096


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over ranks and steps.

    values: seconds of the ranks' own time, then seconds for each name in `PART_KEYS`.
    ideal_s: for each step, the time at which the last rank arrived at the reduction, in seconds since the reduction
    before; the sum over the steps.
    steps: number of steps.
    samples: number of samples of all ranks.
    """

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1 + len(PART_KEYS)))
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
            dict(zip(PART_KEYS, seconds, strict=True)), own_s=own_s, largest_s=largest_s, ideal_s=self.ideal_s,
            steps=self.steps, ranks=num_ranks, samples=self.samples,
        ).document()  # fmt: skip


@final
class EfficiencyWatch:
    """Adds up how all ranks spend their time, per window of steps and over all steps since the start (`total`).

    In each step, only this rank's times are stored. One of these times is the arrival at the reduction: the rank's own
    time and bubbles (waits of pipeline stages) since the previous reduction. At the end of a window, two small
    all-reduces find the latest arrival of all ranks in each step, a maximum, and the sums of all other times. The
    result is exact for any number of ranks, without records of each rank's steps. Rank 0 writes the result.

    total: the efficiencies over all steps since the start; None before the first window has ended.
    """

    def __init__(self, comm: Collective, *, records: RecordWriter, clock: StepClock) -> None:
        self._comm = comm
        self._records = records
        self._clock = clock
        self._after_s: float | None = None  # of the step before: own time that belongs to the next reduction
        self._arrivals_s = array("d")
        self._sums: dict[str, float] = dict.fromkeys(PART_KEYS, 0.0)
        self._samples = 0
        self._own_here_s = 0.0  # of this rank, since this start of the run
        self._before = _Sums()
        self.total: dict[str, Any] | None = None

    def after_step(self, step: int, seconds: Mapping[str, float], *, samples: int, window_ends: bool) -> None:
        """Adds a step. Collective if a window ends, which happens at the same step on all ranks.

        The first step after a start, in which buckets and memory are set up, is left out.

        seconds: the seconds of the step, by name.
        samples: the number of samples of all ranks.
        window_ends: True if the window ends after this step; the same on every rank.
        """
        after_s, self._after_s = self._after_s, seconds["after_sync"]
        if after_s is None:
            return
        self._arrivals_s.append(after_s + seconds["step"] - seconds["exposed_sync"] - seconds["after_sync"])
        for name in PART_KEYS:
            self._sums[name] += seconds.get(name, 0.0)
        self._samples += samples
        if window_ends or len(self._arrivals_s) >= _MOST_STEPS:
            self._window(step)

    def ends(self, step: int) -> None:
        """Ends the last window. Collective.

        step: the last step since this start of the run.
        """
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
        self._sums = dict.fromkeys(PART_KEYS, 0.0)
        self._samples = 0


# Writes down when each part of chosen steps began and ended, on every rank.


@final
class StepTracer:
    """Records when each part of chosen steps begins and ends, on every rank. Other steps cost one comparison each.

    The clocks of the nodes are compared before and after each range of steps.

    steps: ascending ranges of steps to trace.
    directory: the run directory. Each range gets a folder in the run directory, with one file per rank.
    say: function that prints a line for the user, on rank 0.
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        steps: Sequence[range],
        directory: Path,
        updater: DistributedOptimizer,
        clock: StepClock,
        say: Callable[[str], None],
    ) -> None:
        self._world = world
        self._topology = topology
        self._steps = steps
        self._directory = directory
        self._updater = updater
        self._clock = clock
        self._say = say
        self._records: RecordWriter | None = None
        self._step = 0
        self._spans: deque[dict[str, Any]] = deque()

    def after_step(self, step: int) -> None:
        """Starts tracing if a range begins after `step`, and ends tracing if a range ends with `step`.

        Collective in these two cases.
        """
        if not self._steps:
            return
        self._step = step + 1
        self._write()
        wanted = any(step + 1 in steps for steps in self._steps)
        if wanted and self._records is None:
            self._begin()
        elif not wanted:
            self.ends()

    def ends(self) -> None:
        """Ends tracing if it is on. Collective."""
        if self._records is None:
            return
        self._clock.observer = None
        self._updater.observe_reductions(None)
        self._write()
        self._compare_clocks(self._records)
        self._records.close()
        self._records = None

    # ------------------------------------------------------------------ details

    def _begin(self) -> None:
        folder = self._directory / TRACE_FOLDER / f"step-{self._step:08}"
        try:
            make_shared_folder(folder, comm=self._world)
        except LaunchError as error:  # on all ranks; training continues without the trace
            self._say(f"no trace: {error}")
            self._steps = ()
            return
        rank = self._world.rank
        path = folder / f"rank-{rank:05}.jsonl"
        path.unlink(missing_ok=True)  # the trace of the same steps by an earlier start
        self._records = RecordWriter(path)
        self._records.write({
            "kind": "rank", "rank": rank, "ranks": self._world.num_ranks,
            "node": self._topology.node_names[self._topology.node_of(rank)],
            "clock_s": time.perf_counter(), "time": time.time(),
        })  # fmt: skip
        self._compare_clocks(self._records)
        self._clock.observer = self._saw
        self._updater.observe_reductions(self._saw_reduction)

    def _compare_clocks(self, records: RecordWriter) -> None:
        with self._clock.span("exposed_sync"):
            offset = measure_clock_offset(self._world, self._topology)
        records.write({
            "kind": "clock", "clock_s": offset.clock_s, "offset_s": offset.offset_s, "error_s": offset.error_s,
        })  # fmt: skip

    def _saw(self, name: str, begin_s: float, end_s: float) -> None:
        if end_s > begin_s:
            self._spans.append({
                "kind": "span", "step": self._step, "name": name, "begin_s": begin_s, "end_s": end_s,
            })  # fmt: skip

    def _saw_reduction(self, bucket: int, begin_s: float, end_s: float) -> None:
        # On the reduction thread. Parameters that are gathered during the next step count as a part of that.
        self._spans.append({
            "kind": "span", "step": self._step, "name": f"bucket {bucket}", "begin_s": begin_s, "end_s": end_s,
            "bucket": bucket,
        })  # fmt: skip

    def _write(self) -> None:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]  # others are added meanwhile
        if self._records is not None:
            self._records.write_all(spans)
