"""What a rank does in a step, read from the records of a training run on one node. Reads files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.scaling.model.stragglers import spread_of_times
from hpctrain.scaling.model.workload import ReadyBucket, Workload
from hpctrain.telemetry import read_records

WARMUP_STEPS = 10
LEAST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """A run's settings and steps. compute_s: of each rank, by step. samples: of a rank in a step, median."""

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
        """Seconds of computation in a step: median over steps, mean over ranks."""
        return fmean(median(times) for times in self.compute_s)


def read_run(directory: Path) -> RunRecords:
    """Reads a run directory of `hpctrain train`. Raises UsageError if it lacks what a prediction needs."""
    try:
        environment = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
        paths = sorted((directory / "metrics").glob("rank-*.jsonl"))
        records = [list(read_records(path)) for path in paths]
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} is no run directory that can be read: {error}") from error
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
    """Returns the workload of a run on one rank. busy: runs of the same batch for each rank on all cores of one node.

    Without a run on one rank, that of fewest ranks will do; its ranks must have had a core each. Raises UsageError
    for runs of another batch for each rank.
    """
    profile = alone.buckets
    others = [run for run in busy if run.samples != alone.samples]
    if others:
        raise UsageError(
            f"the runs to calibrate with have {alone.samples} and {others[0].samples} samples for each rank in a step: "
            "give both the same"
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
    """The steps after the warm-up, each once: of a step that was done again the later record counts."""
    by_number = {record["step"]: record for record in records if record["kind"] == "step"}
    return [by_number[number] for number in sorted(by_number)][WARMUP_STEPS:]
