"""Collects from a run's records what advice on its number of nodes needs. Memory does not grow with the run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any, final

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.scaling.efficiency import Efficiency, efficiency_from
from hpctrain.scaling.model.calibrate import USUAL
from hpctrain.scaling.model.machine import parse_rate
from hpctrain.scaling.model.workload import MAD_TO_SIGMA, ReadyBucket, spread_of_times
from hpctrain.scaling.nodes_advice.predict_nodes import FixedShare, MeasuredJob, MeasuredLink
from hpctrain.telemetry import ENERGY, PART_KEYS, STEP

Record = Mapping[str, Any]

# Steps whose times are kept, for each number of samples of rank 0; windows of the ranks' efficiency.
_STEPS_KEPT, _SIZES_KEPT, _WINDOWS_KEPT = 200, 8, 60
_LEAST_STEPS = 10  # before these, nothing is said
_LEAST_OF_A_SIZE = 3
_LEAST_RATIO = (
    1.2  # of the largest to the smallest number of samples, from which on the fixed share is fitted
)
# Of the computing that is not the optimizer's: what does not depend on the samples, if nothing shows it, and its error.
_USUAL_FIXED, _USUAL_FIXED_ERROR = 0.2, 0.15
_FIT_ERROR = 0.05  # computing is not quite linear in the number of samples
_LEAST_NOISE = 0.01
_STANDARD_ERROR_OF_MEDIAN = 1.2533


@final
class RunEvidence:
    """What a run has measured of itself since its newest start.

    Of earlier starts, only the times of computing with other numbers of samples are kept: they show which share of the
    computing does not depend on the number of samples.

    Args:
        starts: The lines of `starts.jsonl`, oldest first, or only the newest ones. Times of computing in starts with
            another task, device, number of threads or number of ranks per node are not used.
        probe: The document `probe.json`; None if the nodes were not measured before training.
        calibrations: The entries of `reduction.json`.
        link_bytes_per_s: The nominal rate of a node's link, if somebody gave it.
    """

    def __init__(
        self,
        starts: Sequence[Record],
        *,
        probe: Record | None = None,
        calibrations: Sequence[Record] = (),
        link_bytes_per_s: float | None = None,
    ) -> None:
        self._start = starts[-1]
        self._begun = [float(start["time"]) for start in starts]
        self._alike = [_setting(start) == _setting(starts[-1]) for start in starts]
        self._probe = probe
        self._calibrations = calibrations
        self._given = link_bytes_per_s
        self._by_samples: dict[int, deque[float]] = {}
        self._own: deque[Mapping[str, float]] = deque(maxlen=_STEPS_KEPT)  # of rank 0, since this start
        self._samples: deque[int] = deque(maxlen=_STEPS_KEPT)
        self._windows: deque[Efficiency] = deque(maxlen=_WINDOWS_KEPT)
        self._buckets: Record | None = None
        self._joules: dict[int, tuple[float, float]] = {}  # by rank: joules, seconds
        self._probed_bytes_per_s: float | None = None
        self._save_s = 0.0
        self._first_step_s: float | None = None
        self._num_steps = 0
        self.step: int | None = None

    def add(self, record: Record, *, rank: int = 0) -> None:
        """Adds a record. Of ranks other than 0, only their readings of energy count."""
        kind = record["kind"]
        if kind == ENERGY and record["time"] >= self._start["time"]:
            joules, seconds = self._joules.get(rank, (0.0, 0.0))
            self._joules[rank] = (joules + record["total_j"], seconds + record["seconds"])
        if rank > 0:
            return
        if kind == STEP:
            self._add_step(record)
        elif record["time"] < self._start["time"]:
            return
        elif kind == "efficiency":
            self._windows.append(Efficiency.from_document(record))
        elif kind == "buckets":
            self._buckets = record
        elif kind == "probe":
            self._probed_bytes_per_s = float(min(record["bytes_per_s"]))
        elif kind == "checkpoint":
            self._save_s = float(record["write_seconds"])

    @property
    def enough(self) -> bool:
        """False as long as later records will tell what is still missing."""
        num_ranks = len(self._start["environment"]["ranks"])
        steps = sum(window.steps for window in self._windows) if num_ranks > 1 else len(self._own)
        return self._buckets is not None and steps >= _LEAST_STEPS

    def job(self, *, finished: bool = False) -> MeasuredJob:
        """Returns what is known of the run. Raises UsageError with the reason if this is too little.

        finished: True if the advice is for a run like this one, from its first step to its last.
        """
        environment, recipe = self._start["environment"], self._start["recipe"]
        by_node = [len(ranks) for ranks in environment["ranks_by_node"]]
        if len(set(by_node)) > 1:
            raise UsageError(f"the nodes have different numbers of ranks: {', '.join(map(str, by_node))}")
        self._check_model(recipe)
        parts, steps = self._parts(num_ranks=sum(by_node))
        if self._buckets is None:
            raise UsageError(
                "the buckets of gradients are not recorded yet: a run records them every 100 steps"
            )
        buckets = self._buckets
        computing_s = parts["compute"] + parts["hidden_reduction"]
        backward_s = min(float(buckets["backward_s"]), computing_s)
        update_s = min(float(buckets["update_s"]), computing_s - backward_s)
        ranks = environment["ranks"]
        here = [rank for rank in ranks if rank["node"] == ranks[0]["node"]]
        scaling = recipe.get("scaling") or {}
        total, done = (
            int(self._start["total_steps"]),
            self.step if self.step is not None else self._start["step"],
        )
        return MeasuredJob(
            nodes=len(by_node), ranks_per_node=by_node[0], global_batch=int(recipe["data"]["global_batch"]),
            steps_left=total if finished else total - int(done), parts=parts, steps=steps, noise=self._noise(),
            sigma=self._sigma(),
            fixed=self._fixed_share(update_share=update_s / computing_s),
            backward_share=backward_s / computing_s, update_share=update_s / computing_s,
            buckets=tuple(
                ReadyBucket(float(size), min(1.0, max(0.0, ready / buckets["backward_s"])))
                for size, ready in zip(buckets["bytes"], buckets["ready_s"], strict=True)
            ) if buckets["backward_s"] > 0 else (),
            algorithm=str(environment["algorithm"]).removeprefix("auto: "), wire=str(environment["wire"]),
            overlap=bool((environment.get("reduction") or {}).get("overlap", True)),
            cores=len({core for rank in here for core in rank["cores"]}) or 1, threads=int(ranks[0]["threads"]),
            offloaded=str(ranks[0]["device"]) != "cpu",
            link=self._link(recipe), move_s=0.0 if finished else self._move_s(),
            watts=self._watts(), least_nodes=scaling.get("min_nodes"), most_nodes=scaling.get("max_nodes"),
        )  # fmt: skip

    # ------------------------------------------------------------------ details

    def _add_step(self, record: Record) -> None:
        samples, seconds = int(record["samples"]), record["seconds"]
        current = record["time"] >= self._start["time"]
        if current:
            self.step = int(record["step"])
            self._num_steps += 1
            if self._first_step_s is None:
                # In the first step, buckets and memory are set up.
                self._first_step_s = float(record["time"])
                return
            self._own.append(seconds)
            self._samples.append(samples)
        place = bisect_right(self._begun, float(record["time"])) - 1
        if samples < 1 or place < 0 or not self._alike[place]:
            return
        times = self._by_samples.pop(samples, None) or deque(maxlen=_STEPS_KEPT)
        times.append(seconds["compute"])
        self._by_samples[samples] = times
        while len(self._by_samples) > _SIZES_KEPT:
            del self._by_samples[next(iter(self._by_samples))]  # the size that was seen longest ago

    @staticmethod
    def _check_model(recipe: Record) -> None:
        parallel = recipe.get("parallel") or {}
        for key, usual in (("pipeline", 1), ("tensor", 1), ("shard", "none")):
            if (found := parallel.get(key, usual)) != usual:
                raise UsageError(
                    f"the model has no formula for parallel.{key} = {found!r}, only for replicas"
                )
        if schedule := (recipe.get("reduction") or {}).get("schedule"):
            raise UsageError(
                f"the model has no formula for reduction.schedule with method = {schedule['method']!r}, only for steps "
                "in which all ranks sum their gradients"
            )

    def _parts(self, *, num_ranks: int) -> tuple[Mapping[str, float], int]:
        """Returns the seconds per step of each part, over all ranks, and the number of steps."""
        steps = sum(window.steps for window in self._windows)
        if steps >= _LEAST_STEPS:
            names = self._windows[0].parts
            return {
                name: sum(window.steps * window.parts[name] for window in self._windows) / steps
                for name in names
            }, steps
        if num_ranks > 1 or len(self._own) < _LEAST_STEPS:
            raise UsageError(
                f"fewer than {_LEAST_STEPS} steps have been measured on all ranks since the start; the first one is "
                "left out"
            )
        sums = {key: sum(seconds.get(key, 0.0) for seconds in self._own) for key in PART_KEYS}
        own_s = sum(
            seconds["step"] - seconds["exposed_sync"] - seconds.get("bubble", 0.0) for seconds in self._own
        )
        found = efficiency_from(
            sums, own_s=own_s, largest_s=own_s, ideal_s=own_s, steps=len(self._own), ranks=1,
            samples=sum(self._samples),
        )  # fmt: skip
        return found.parts, found.steps

    def _noise(self) -> float:
        """Returns the relative standard error of the mean step: from windows if there are enough, else from steps."""
        means = [window.step_s for window in self._windows]
        if len(means) < 4:
            means = [seconds["step"] for seconds in self._own]
        if len(means) < 2 or fmean(means) <= 0:
            return _LEAST_NOISE
        return math.hypot(pstdev(means) / fmean(means) / math.sqrt(len(means) - 1), _LEAST_NOISE)

    def _sigma(self) -> float:
        """Returns the spread of rank 0's computing over the steps with the most frequent number of samples."""
        return spread_of_times(max(self._by_samples.values(), key=len, default=deque()))

    def _fixed_share(self, *, update_share: float) -> FixedShare:
        """Returns the share of computing that does not depend on the samples.

        If rank 0 has computed steps with clearly different numbers of samples (last batches of epochs, or earlier
        starts on another number of ranks), a straight line through the medians of their times gives the share.
        """
        sizes = {size: times for size, times in self._by_samples.items() if len(times) >= _LEAST_OF_A_SIZE}
        usual = max(sizes, key=lambda size: len(sizes[size]), default=0)
        if usual and max(sizes) >= _LEAST_RATIO * min(sizes):
            medians = {size: median(times) for size, times in sizes.items()}
            errors = {
                size: max(
                    _STANDARD_ERROR_OF_MEDIAN * MAD_TO_SIGMA * median(abs(t - medians[size]) for t in times)
                    / math.sqrt(len(times)),
                    _LEAST_NOISE * medians[size],
                )
                for size, times in sizes.items()
            }  # fmt: skip
            share, error = _line(medians, errors, at=usual)
            return FixedShare(
                value=min(1.0, max(0.0, share)), error=math.hypot(error, _FIT_ERROR),
                source=f"steps with {', '.join(map(str, sorted(sizes)))} samples on rank 0",
            )  # fmt: skip
        rest = 1 - update_share
        return FixedShare(
            value=update_share + rest * _USUAL_FIXED, error=rest * _USUAL_FIXED_ERROR,
            source="assumed, since rank 0 has computed batches of one size only",
        )  # fmt: skip

    def _link(self, recipe: Record) -> MeasuredLink | None:
        """Returns the link between nodes: from a probe, from `auto`'s measurement, or as given."""
        nodes = [node for node in (self._probe or {}).get("nodes", ()) if node.get("bytes_per_s")]
        if nodes:
            latencies = [float(node.get("latency_s", USUAL["latency_s"])) for node in nodes]
            return MeasuredLink(
                bytes_per_s=min(float(node["bytes_per_s"]) for node in nodes), latency_s=median(latencies),
                source="probe.json, slowest node",
            )  # fmt: skip
        for entry in reversed(self._calibrations):
            for level in entry["found"]["levels"]:
                if level["axis"] == "node":
                    # An all-reduce of one number takes 2 log2 N messages one after another.
                    rounds = 2 * max(1.0, math.log2(level["num_members"]))
                    return MeasuredLink(
                        bytes_per_s=float(level["bytes_per_s"]), latency_s=float(level["latency_s"]) / rounds,
                        source="reduction.json, an all-reduce",
                    )  # fmt: skip
        if (rate := self._probed_bytes_per_s) is not None:
            latency_s = USUAL["latency_s"]
            return MeasuredLink(
                bytes_per_s=rate, latency_s=latency_s, source="probe during training, slowest node"
            )
        given = self._given
        if given is None and (text := (recipe.get("scaling") or {}).get("link")) is not None:
            given = parse_rate(text)
        if given is None:
            return None
        return MeasuredLink(
            bytes_per_s=given * USUAL["link_share"],
            latency_s=USUAL["latency_s"],
            source="given",
            measured=False,
        )

    def _move_s(self) -> float:
        """Returns the time of a stop and a start: as long as this start took, and as the newest save took."""
        launched_s = ((self._start["environment"].get("start") or {}).get("seconds")) or 0.0
        first_s = 0.0 if self._first_step_s is None else self._first_step_s - float(self._start["time"])
        return float(launched_s) + first_s + self._save_s

    def _watts(self) -> float | None:
        """Returns the mean power of the nodes that have counters."""
        watts = [joules / seconds for joules, seconds in self._joules.values() if seconds > 0]
        return fmean(watts) if watts else None


def _setting(start: Record) -> list[Any]:
    """Returns what the time of computing depends on, besides the number of samples."""
    environment = start["environment"]
    first = environment["ranks"][0]
    per_node = [len(ranks) for ranks in environment["ranks_by_node"]]
    device = str(first["device"]).partition(":")[0]
    return [
        start["recipe"]["task"],
        start["recipe"]["run"]["precision"],
        device,
        first["threads"],
        per_node[0],
    ]


def _line(medians: Mapping[int, float], errors: Mapping[int, float], *, at: int) -> tuple[float, float]:
    """Fits seconds = fixed + slope * samples by weighted least squares.

    Returns fixed / (seconds at `at` samples), and its standard error.
    """
    sizes = np.array(sorted(medians), dtype=np.float64)
    seconds = np.array([medians[int(size)] for size in sizes])
    weights = 1 / np.array([errors[int(size)] for size in sizes])
    design = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    covariance = np.linalg.inv(design.T @ design)
    fixed, slope = covariance @ (design.T @ (seconds * weights))
    total = fixed + slope * at
    # share = fixed / (fixed + slope at): to first order in both.
    gradient = np.array([slope * at, -fixed * at]) / total**2
    return float(fixed / total), math.sqrt(float(gradient @ covariance @ gradient))
