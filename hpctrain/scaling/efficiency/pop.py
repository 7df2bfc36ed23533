"""The efficiency hierarchy of the POP Centre of Excellence for synchronous training. Pure.

Sources: POP CoE, "POP Standard Metrics for Parallel Performance Analysis" (pop-coe.eu); C. Rosas, J. Gimenez and
J. Labarta, "Scalability Prediction for Fundamental Performance Factors", Supercomputing Frontiers and Innovations 1(2),
2014. The derivation for steps that end with a reduction is in docs/guides/efficiency.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Where a rank's time goes; the parts add up to the step.
PARTS = (
    "compute", "hidden_reduction", "exposed_reduction", "waiting", "bubble", "input", "checkpoint", "evaluation",
    "other",
)  # fmt: skip
# Names of the records' seconds from which the parts follow.
RECORDED = ("input", "compute", "hidden_sync", "bubble", "exposed_sync", "checkpoint", "evaluation", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Efficiencies between 0 and 1. computing: the share of the ranks' own time in which they computed."""

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
    """Where the time of all ranks went in some steps.

    parts: seconds in a step by name of `PARTS`, mean over ranks and steps. own_s: a rank's time in a step without
    communication: `mean` over ranks and steps, `largest` of a rank over all steps, and `ideal`, the mean over the steps
    of the latest arrival in each: the largest own time, in a pipeline with its bubbles. samples: of all ranks in these
    steps.
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
        """Seconds of computing in a step, mean over the ranks."""
        return self.parts["compute"] + self.parts["hidden_reduction"]

    @property
    def factors(self) -> Factors:
        mean, largest, ideal = (self.own_s[name] for name in ("mean", "largest", "ideal"))
        own_parts = sum(self.parts[name] for name in ("input", "checkpoint", "evaluation", "other"))
        return Factors(
            load_balance=_ratio(mean, largest),
            serialisation=_ratio(largest, ideal),
            transfer=_ratio(
                ideal, mean + sum(self.parts[name] for name in ("bubble", "exposed_reduction", "waiting"))
            ),
            computing=_ratio(self.computed_s, self.computed_s + own_parts),
        )

    def document(self) -> dict[str, Any]:
        """Returns the fields of the records `efficiency` in docs/metrics.md."""
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
        """Returns the efficiency of which `document` returned the fields. Raises KeyError, TypeError."""
        found = {name: document[name] for name in ("steps", "ranks", "samples", "parts", "own_s")}
        # Versions before pipelines recorded no bubble.
        return cls(**{**found, "parts": {"bubble": 0.0, **document["parts"]}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A run against a reference, usually on fewer ranks.

    computation: computing of all ranks for a sample, of the reference divided by this run's. global_efficiency:
    parallel efficiency x share of computing x computation scaling, that is, the computing that the reference needs
    for this run's samples, divided by the time of all ranks. relative_speed: samples/s of a rank divided by the
    reference's.
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
    """Returns the efficiency of `steps` steps of `ranks` ranks.

    seconds: by name of `RECORDED`, sums over ranks and steps. own_s: time without communication, summed over ranks and
    steps; largest_s: the largest of a rank's sums over the steps; ideal_s: the sum over the steps of the largest own
    time with bubbles.
    """
    mean = {name: seconds[name] / (steps * ranks) for name in RECORDED}
    own = {"mean": own_s / (steps * ranks), "largest": largest_s / steps, "ideal": ideal_s / steps}
    waiting = min(max(0.0, own["ideal"] - own["mean"] - mean["bubble"]), mean["exposed_sync"])
    hidden = min(mean["hidden_sync"], mean["compute"])
    parts = {
        "compute": mean["compute"] - hidden,
        "hidden_reduction": hidden,
        "exposed_reduction": mean["exposed_sync"] - waiting,
        "waiting": waiting,
        **{name: mean[name] for name in ("bubble", "input", "checkpoint", "evaluation", "other")},
    }
    return Efficiency(steps=steps, ranks=ranks, samples=samples, parts=parts, own_s=own)


def against(run: Efficiency, *, reference: Efficiency) -> Scaling:
    """Compares a run with a reference, of the same model on samples of the same size."""
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
