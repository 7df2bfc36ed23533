"""Divides each step's time on every rank into parts, and computes the POP efficiencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.telemetry import (
    OPTIONAL_KEYS,
    PART_KEYS,
    PART_NAMES,
    STEP_PARTS,
    PartKind,
    RunDirectory,
)

# The efficiency hierarchy of the POP Centre of Excellence for synchronous training. Pure.
#
# Sources: POP CoE, "POP Standard Metrics for Parallel Performance Analysis" (pop-coe.eu); C. Rosas, J.
# Gimenez and J. Labarta, "Scalability Prediction for Fundamental Performance Factors", Supercomputing
# Frontiers and Innovations 1(2), 2014. The derivation for steps that end with a reduction is in
# docs/guides/efficiency.md.


_Seconds = TypeVar("_Seconds", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The POP efficiencies, between 0 and 1.

    computing: the share of computing in the time that ranks spend neither in communication nor in pipeline bubbles.
    """

    load_balance: float
    serialisation: float
    transfer: float
    computing: float

    @property
    def communication(self) -> float:
        return self.serialisation * self.transfer

    @property
    def parallel(self) -> float:
        return self.load_balance * self.communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How the ranks spent their time in some steps.

    Attributes:
        parts: The seconds per step of each part, by the names in `PART_NAMES`, as the mean over ranks and steps.
        own_s: A rank's own time, that is, its seconds per step without communication. `mean` is the mean over ranks
            and steps. `largest` is the mean over the steps of the slowest rank. `ideal` is the mean over the steps of
            the largest own time in each step; in a pipeline, this time includes bubbles.
        samples: The number of samples of all ranks in these steps.
    """

    steps: int
    ranks: int
    samples: int
    parts: Mapping[str, float]
    own_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def computed_s(self) -> float:
        """The seconds of computing per step, as the mean over the ranks."""
        return self._seconds_of(PartKind.COMPUTING)

    @property
    def factors(self) -> Factors:
        mean, largest, ideal = (self.own_s[name] for name in ("mean", "largest", "ideal"))
        rest = self._seconds_of(PartKind.REST)
        return Factors(
            load_balance=_ratio(mean, largest),
            serialisation=_ratio(largest, ideal),
            transfer=_ratio(ideal, mean + self._seconds_of(PartKind.PIPELINE, PartKind.REDUCTION)),
            computing=_ratio(self.computed_s, self.computed_s + rest),
        )

    def _seconds_of(self, *kinds: PartKind) -> float:
        return sum(self.parts[part.name] for kind in kinds for part in STEP_PARTS if part.kind is kind)

    def document(self) -> dict[str, Any]:
        """Returns the fields of a record `efficiency`, as docs/metrics.md describes them."""
        factors = self.factors
        return {
            "steps": self.steps, "ranks": self.ranks, "samples": self.samples, "step_s": self.step_s,
            "parts": dict(self.parts), "own_s": dict(self.own_s),
            "factors": {
                "parallel": factors.parallel, "communication": factors.communication, **asdict(factors),
            },
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Efficiency:
        """Returns the efficiency from a result of `document`. Raises KeyError or TypeError if fields are wrong."""
        found = {name: document[name] for name in ("steps", "ranks", "samples", "parts", "own_s")}
        absent = {part.name: 0.0 for part in STEP_PARTS if part.optional}
        return cls(**{**found, "parts": {**absent, **document["parts"]}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A run compared with a reference, usually on fewer ranks.

    Attributes:
        computation: The computing time per sample, summed over all ranks: the reference's divided by this run's.
        global_efficiency: Parallel efficiency x share of computing x computation scaling, that is, the computing time
            that the reference needs for this run's samples, divided by the time of all ranks.
        relative_speed: The samples/s per rank of this run divided by the samples/s per rank of the reference.
    """

    computation: float
    global_efficiency: float
    relative_speed: float


def efficiency_from(
    seconds: Mapping[str, float],
    *,
    own_s: float,
    largest_s: float,
    ideal_s: float,
    steps: int,
    ranks: int,
    samples: int,
) -> Efficiency:
    """Divides the time of `steps` steps of `ranks` ranks into parts, whose shares are the efficiencies.

    Args:
        seconds: The recorded seconds, summed over ranks and steps, by the names in `PART_KEYS`.
        own_s: The ranks' own time (without communication), summed over ranks and steps.
        largest_s: The own time of one rank, summed over the steps: of the rank for which this sum is largest.
        ideal_s: In each step the longest own time of any rank, including pipeline bubbles, summed over the steps.
    """
    mean = {name: seconds[name] / (steps * ranks) for name in PART_KEYS}
    own = {"mean": own_s / (steps * ranks), "largest": largest_s / steps, "ideal": ideal_s / steps}
    waiting = min(max(0.0, own["ideal"] - own["mean"] - mean["bubble"]), mean["exposed_sync"])
    hidden = min(mean["hidden_sync"], mean["compute"])
    parts = divided(mean, hidden=hidden, waiting=waiting)
    return Efficiency(steps=steps, ranks=ranks, samples=samples, parts=parts, own_s=own)


def divided(seconds: Mapping[str, _Seconds], *, hidden: _Seconds, waiting: _Seconds) -> dict[str, _Seconds]:
    """Returns the seconds of each part of a step, by the names in `PART_NAMES`. All parts add up to the step.

    Args:
        seconds: The recorded seconds, by the names in `PART_KEYS`.
        hidden: The seconds of `compute` in which a reduction ran.
        waiting: The seconds of `exposed_sync` in which slower ranks had not reached the reduction.
    """
    differ = {
        "compute": seconds["compute"] - hidden,
        "hidden_reduction": hidden,
        "exposed_reduction": seconds["exposed_sync"] - waiting,
        "waiting": waiting,
    }
    return {part.name: differ[part.name] if part.name in differ else seconds[part.key] for part in STEP_PARTS}


def against(run: Efficiency, *, reference: Efficiency) -> Scaling:
    """Compares a run with a reference run that had the same model and samples of the same size."""
    factors = run.factors
    computation = _ratio(_computed_for_a_sample(reference), _computed_for_a_sample(run))
    return Scaling(
        computation=computation,
        global_efficiency=factors.parallel * factors.computing * computation,
        relative_speed=_ratio(_rank_seconds_for_a_sample(reference), _rank_seconds_for_a_sample(run)),
    )


def _computed_for_a_sample(run: Efficiency) -> float:
    return _ratio(run.computed_s * run.ranks * run.steps, run.samples)


def _rank_seconds_for_a_sample(run: Efficiency) -> float:
    return _ratio(run.step_s * run.ranks * run.steps, run.samples)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 1.0


# The time of every step on every rank divided into parts, from the records of all ranks. Pure.
#
# A rank's own record does not say for how long it waited for slower ranks and for how long for the network.
# The records of all ranks do, since a reduction ends on all of them together: the last rank to arrive waits
# for the network only, and the others wait for it in addition.


Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The recorded seconds of all ranks.

    Attributes:
        steps: The step numbers, ascending, shape (steps,).
        samples: The number of samples of all ranks in each step, shape (steps,).
        seconds: The seconds by the names in `PART_KEYS`, `step` and `after_sync`, each of shape (ranks, steps).
        carried: `after_sync` of the previous step, shape (ranks, steps); 0 if that step has no record.
    """

    steps: NDArray[np.int64]
    samples: NDArray[np.int64]
    seconds: Mapping[str, Times]
    carried: Times

    @property
    def num_ranks(self) -> int:
        return int(self.seconds["step"].shape[0])


def own_times(times: StepTimes) -> Times:
    """Returns each rank's time, without communication, from the end of one reduction to the end of the next.

    The shape is (ranks, steps).

    If the previous step has no record, the time starts at the start of the step.
    """
    return _arrivals(times) - times.seconds["bubble"]


def _arrivals(times: StepTimes) -> Times:
    """Returns when each rank arrives at a step's reduction: its own time and bubbles since the previous reduction."""
    seconds = times.seconds
    return seconds["step"] - seconds["exposed_sync"] - seconds["after_sync"] + times.carried


def attribute(times: StepTimes) -> Times:
    """Returns the seconds of all parts of all steps, shape (ranks, steps, parts), in the order of `PART_NAMES`.

    The parts of a step add up to the seconds of that step.
    """
    seconds = times.seconds
    arrivals = _arrivals(times)
    waiting = np.minimum(arrivals.max(axis=0) - arrivals, seconds["exposed_sync"])
    hidden = np.minimum(seconds["hidden_sync"], seconds["compute"])
    return np.stack(list(divided(seconds, hidden=hidden, waiting=waiting).values()), axis=-1)


def efficiency_of(times: StepTimes) -> Efficiency:
    """Returns the POP efficiencies of the given steps, at least one step."""
    own = own_times(times)
    return efficiency_from(
        {name: float(times.seconds[name].sum()) for name in PART_KEYS},
        own_s=float(own.sum()),
        largest_s=float(own.sum(axis=1).max()),
        ideal_s=float(_arrivals(times).max(axis=0).sum()),
        steps=len(times.steps),
        ranks=times.num_ranks,
        samples=int(times.samples.sum()),
    )


def document_of(times: StepTimes) -> dict[str, Any]:
    """Returns, as JSON, the efficiency of these steps, and for each rank the seconds per step of each part."""
    by_rank = attribute(times).mean(axis=1)
    ranks = [dict(zip(PART_NAMES, row.tolist(), strict=True)) for row in by_rank]
    first, last = int(times.steps[0]), int(times.steps[-1])
    return {"first_step": first, "last_step": last, **efficiency_of(times).document(), "by_rank": ranks}


# Reads the times of steps and the efficiencies from a run directory.


_NAMES = (*PART_KEYS, "step", "after_sync")


def read_step_times(directory: Path, *, first: int = 2, last: int | None = None) -> StepTimes:
    """Returns the recorded times of all ranks of the run in `directory`, for the steps from `first` to `last`.

    By default the first step of a run is left out, since buckets and memory are set up in the first step. For a
    repeated step the later record counts. Raises UsageError if a rank has not recorded its steps, or if no step was
    recorded by all ranks.
    """
    run = RunDirectory(directory)
    num_ranks = len(run.environment()["ranks"])
    advice = "dividing each rank's time needs the records of all, which telemetry.ranks = 'all' writes"
    by_rank = [run.steps(rank, num_ranks=num_ranks, advice=advice) for rank in range(num_ranks)]
    wanted = [s for s in by_rank[0] if s >= first and (last is None or s <= last)]
    steps = sorted(s for s in wanted if all(s in records for records in by_rank))
    if not steps:
        raise UsageError(
            f"{directory / 'metrics'} has no step from {first} to {last or 'the end'} that all {num_ranks} ranks "
            "recorded"
        )
    if "after_sync" not in by_rank[0][steps[0]]["seconds"]:
        raise UsageError(
            f"the records in {directory / 'metrics'} have no field `after_sync`, since an earlier version of hpctrain "
            "wrote them: only records of newer runs can be divided into parts"
        )

    def carried(record: Mapping[str, Any] | None) -> float:
        return 0.0 if record is None else record["seconds"].get("after_sync", 0.0)

    return StepTimes(
        steps=np.array(steps),
        samples=np.array([sum(records[s]["samples"] for records in by_rank) for s in steps]),
        seconds={
            name: np.array([[_seconds(records[s], name) for s in steps] for records in by_rank])
            for name in _NAMES
        },
        carried=np.array([[carried(records.get(s - 1)) for s in steps] for records in by_rank]),
    )


def _seconds(record: Mapping[str, Any], name: str) -> float:
    found: Mapping[str, float] = record["seconds"]
    return found.get(name, 0.0) if name in OPTIONAL_KEYS else found[name]


def read_efficiency(directory: Path) -> Efficiency:
    """Returns the efficiency over all ranks and steps since the last start, from the summary of the run in `directory`.

    Raises UsageError if there is no summary yet, or if the summary has no efficiency.
    """
    run = RunDirectory(directory)
    document = (run.summary() or {}).get("efficiency")
    try:
        if document is not None:
            return Efficiency.from_document(document)
        why = ""
    except (KeyError, TypeError) as error:
        why = f" ({type(error).__name__}: {error})"
    raise UsageError(
        f"{run.summary_path} has no efficiency{why}: it is written at the end of a run of at least two steps"
    )
