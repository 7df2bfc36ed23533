"""The work of one rank in a step, as read from a run's records, and how much longer the slowest rank takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.telemetry import RunDirectory

# What one rank does in a step, independent of the number of ranks. Pure.


@dataclass(frozen=True, slots=True)
class ReadyBucket:
    """A bucket of float32 gradients. ready: fraction of backward after which the bucket is complete, 0 to 1."""

    num_bytes: float
    ready: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of one step on a rank that has a core, or a GPU, of its own.

    forward_s, backward_s: seconds of forward and backward for `samples` samples. update_s: seconds of the optimizer and
    of everything else after the reduction. buckets: the gradients, in the order of their reduction. input_bytes: bytes
    that each rank reads per step. sigma: variation of a rank's time from step to step, see `slowest_factor`.
    busy_slowdown: time of computation if every core of the machine is busy, divided by the time if one core is busy.
    overlap_slowdown: factor by which computation takes longer while reductions run at the same time, measured on a pair
    of nodes. input_s: seconds that a step waits for its batch even if no other rank reads. checkpoint_s: seconds by
    which saving lengthens a step, as the mean over all steps.
    """

    forward_s: float
    backward_s: float
    update_s: float
    samples: int
    buckets: tuple[ReadyBucket, ...]
    sigma: float = 0.0
    busy_slowdown: float = 1.0
    overlap_slowdown: float = 1.0
    input_bytes: float = 0.0
    input_s: float = 0.0
    checkpoint_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.buckets or not self.forward_s + self.backward_s > 0 or self.samples < 1:
            raise UsageError(
                "a workload needs at least one bucket, at least one sample, and a time of forward and backward above 0"
            )

    @property
    def gradient_bytes(self) -> float:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    def with_slower_computation(self, factor: float) -> Workload:
        """Returns the workload with `factor` times as much time for all computation."""
        return replace(
            self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s,
            update_s=factor * self.update_s,
        )  # fmt: skip

    def with_samples(self, samples: int) -> Workload:
        """Returns the workload for another number of samples: forward, backward and input bytes are in proportion."""
        factor = samples / self.samples
        return replace(
            self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s, samples=samples,
            input_bytes=factor * self.input_bytes,
        )  # fmt: skip

    def with_bucket_bytes(self, bucket_bytes: float) -> Workload:
        """Returns the workload with the gradients in buckets of `bucket_bytes`.

        Within a bucket of this workload, gradients are assumed to become ready at a constant rate.
        """
        return replace(self, buckets=rebucketed(self.buckets, bucket_bytes=bucket_bytes))


def rebucketed(buckets: Sequence[ReadyBucket], *, bucket_bytes: float) -> tuple[ReadyBucket, ...]:
    """Returns the gradients of `buckets`, in order, in buckets of `bucket_bytes`; the last bucket may be smaller."""
    ends: list[tuple[float, float]] = [(0.0, 0.0)]  # bytes so far, ready
    for bucket in buckets:
        ends.append((ends[-1][0] + bucket.num_bytes, max(ends[-1][1], bucket.ready)))
    total = ends[-1][0]
    found = []
    done, place = 0.0, 1
    while done < total:
        end = min(total, done + bucket_bytes)
        if total - end < 1e-9 * total:
            end = total
        while ends[place][0] < end * (1 - 1e-12):
            place += 1
        (low_bytes, low), (high_bytes, high) = ends[place - 1], ends[place]
        ready = low + (high - low) * (end - low_bytes) / (high_bytes - low_bytes)
        found.append(ReadyBucket(end - done, ready))
        done = end
    return tuple(found)


# How much longer the slowest of many ranks takes than one of them. Pure.
#
# A step ends when its last rank does. Times of one rank vary by a lognormal factor of median 1; the
# expected largest of N such factors follows from the quantile at Blom's plotting position (Blom 1958; David
# and Nagaraja, Order Statistics, section 4.5), whose error is below 1 % from N = 2 on for sigma up to 0.3.
# For many ranks the largest is Gumbel distributed, which gives its spread.


BLOM = 0.375
MAD_TO_SIGMA = 1.4826


def slowest_factor(sigma: float, count: int) -> float:
    """Returns the expected largest of `count` lognormal factors, divided by the mean of one factor.

    sigma: standard deviation of the factors' logarithm. Raises UsageError if `sigma` is negative.
    """
    if sigma < 0:
        raise UsageError(f"the spread of the ranks' times is {sigma}: give at least 0")
    if sigma == 0 or count <= 1:
        return 1.0
    quantile = NormalDist().inv_cdf((count - BLOM) / (count + 1 - 2 * BLOM))
    return math.exp(sigma * quantile - sigma * sigma / 2)


def spread_of_times(seconds: Sequence[float]) -> float:
    """Returns sigma of lognormal times, from the median absolute deviation of their logarithms.

    A checkpoint or a pause in a few steps does not change the result much. Returns 0 for fewer than 3 times.
    """
    if len(seconds) < 3:
        return 0.0
    logs = [math.log(value) for value in seconds if value > 0]
    middle = median(logs)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in logs)


# What a rank does in a step, read from the records of a training run on one node. Reads files.


WARMUP_STEPS = 10
LEAST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Settings and step times of a run, in seconds.

    compute_s: computation, as compute_s[rank][step]. step_s: the slowest rank's time, as the median over the steps.
    exposed_s, input_s, checkpoint_s: means over ranks and steps. samples: rank 0's number of samples per step, as the
    median over the steps.
    """

    ranks: int
    nodes: int
    threads: int
    cores: int
    algorithm: str
    wire: str
    overlap: bool
    compute_s: tuple[tuple[float, ...], ...]
    step_s: float
    exposed_s: float
    input_s: float
    checkpoint_s: float
    samples: int
    buckets: dict[str, Any]

    @property
    def rank_compute_s(self) -> float:
        """Seconds of computation per step: median over steps, mean over ranks."""
        return fmean(median(times) for times in self.compute_s)


def read_workload(directory: Path) -> RunRecords:
    """Reads a run directory of `hpctrain train`. Raises UsageError if the directory lacks what a prediction needs."""
    run = RunDirectory(directory)
    environment, records = run.environment(), list(run.all_records())
    steps = [_steps(of_rank) for of_rank in records]
    if not steps or min(map(len, steps)) < LEAST_STEPS:
        raise UsageError(
            f"{directory}: a prediction needs at least {WARMUP_STEPS + LEAST_STEPS} recorded steps of every rank "
            "(telemetry.metrics_every_steps = 1); the first ones are left out"
        )
    profiles = [record for record in records[0] if record["kind"] == "buckets"]
    if not profiles:
        raise UsageError(
            f"{directory} has no times of buckets: they are recorded from hpctrain 0.1 on, by runs of `hpctrain train`"
        )

    def mean(name: str) -> float:
        return fmean(fmean(step["seconds"][name] for step in of_rank) for of_rank in steps)

    reduction = environment.get("reduction") or {}
    return RunRecords(
        ranks=len(environment["ranks"]), nodes=len(environment["node_names"]),
        threads=environment["ranks"][0]["threads"], cores=len(environment["ranks"][0]["cores"]),
        algorithm=environment["algorithm"], wire=environment["wire"], overlap=bool(reduction.get("overlap", True)),
        compute_s=tuple(tuple(step["seconds"]["compute"] for step in of_rank) for of_rank in steps),
        step_s=median(max(of_rank[place]["seconds"]["step"] for of_rank in steps)
                      for place in range(min(map(len, steps)))),
        exposed_s=mean("exposed_sync"), input_s=mean("input"), checkpoint_s=mean("checkpoint"),
        samples=round(median(step["samples"] for step in steps[0])), buckets=profiles[-1],
    )  # fmt: skip


def workload_of(alone: RunRecords, *, busy: Sequence[RunRecords] = ()) -> Workload:
    """Returns the workload of the run `alone`.

    alone: a run on one rank or, if there is none, on few ranks, each with a core of its own. busy: runs with the same
    batch per rank on all cores of one node. Raises UsageError if the batch per rank differs.
    """
    profile = alone.buckets
    others = [run for run in busy if run.samples != alone.samples]
    if others:
        raise UsageError(
            f"the runs of --calibration have {alone.samples} and {others[0].samples} samples per rank and step: use "
            "runs with the same number"
        )
    backward_s, update_s = profile["backward_s"], profile["update_s"]
    ratios = [run.rank_compute_s / alone.rank_compute_s for run in busy]
    return Workload(
        forward_s=max(0.0, alone.rank_compute_s - backward_s - update_s),
        backward_s=backward_s,
        update_s=update_s,
        samples=alone.samples,
        buckets=tuple(
            ReadyBucket(num_bytes, min(1.0, max(0.0, ready_s / backward_s)))
            for num_bytes, ready_s in zip(profile["bytes"], profile["ready_s"], strict=True)
        ),
        sigma=fmean(spread_of_times(times) for times in alone.compute_s),
        busy_slowdown=max(1.0, max(ratios, default=1.0)),
        input_s=alone.input_s,
        checkpoint_s=alone.checkpoint_s,
    )


def _steps(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of the steps after the warm-up. Of a repeated step only the later record is returned."""
    by_number = {record["step"]: record for record in records if record["kind"] == "step"}
    return [by_number[number] for number in sorted(by_number)][WARMUP_STEPS:]
