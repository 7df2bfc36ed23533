"""Laws of scaling: how the rate of a run follows from its number of ranks, with few parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.float64]
STRONG = "strong"
WEAK = "weak"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a law: where its fit starts, and the bounds within which it has a meaning."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """A law that can be fitted to a sweep.

    formula: for readers, S(N) is the speedup over one rank. parameters: besides the rate of one rank, which every fit
    has. speedup: S at each number of ranks; its second argument are the parameters in their order.
    modes: scalings (`strong`, `weak`) for which the law was made.
    peak: returns the number of ranks with the highest rate, from the parameters; None if the rate grows for ever.
    """

    name: str
    formula: str
    parameters: tuple[Parameter, ...]
    speedup: Callable[[Ranks, NDArray[np.float64]], Ranks]
    modes: tuple[str, ...] = (STRONG, WEAK)
    peak: Callable[[Mapping[str, float]], float | None] = lambda parameters: None


def laws_of(mode: str) -> tuple[ScalingLaw, ...]:
    """Returns the laws for `strong` or `weak` scaling, those with fewer parameters first.

    Another law, such as a model of the machine, is fitted by adding it: `fit_laws(..., laws=(*laws_of(mode), mine))`.
    """
    return tuple(law for law in _LAWS if mode in law.modes)


def _usl_peak(parameters: Mapping[str, float]) -> float | None:
    sigma, kappa = parameters["sigma"], parameters["kappa"]
    return math.sqrt((1 - sigma) / kappa) if kappa > 0 and sigma < 1 else None


_SERIAL = Parameter(name="sigma", start=0.05, low=0.0, high=1.0)

_LAWS = (
    ScalingLaw(
        name="linear", formula="S = N", parameters=(), speedup=lambda ranks, _: ranks,
    ),
    # Amdahl 1967, doi:10.1145/1465482.1465560; sigma is the part of one rank's time that is not shared.
    ScalingLaw(
        name="Amdahl", formula="S = N / (1 + sigma (N - 1))", parameters=(_SERIAL,), modes=(STRONG,),
        speedup=lambda ranks, p: ranks / (1 + p[0] * (ranks - 1)),
    ),
    # Gustafson 1988, doi:10.1145/42411.42415; sigma is the part of the time on N ranks that is not shared.
    ScalingLaw(
        name="Gustafson", formula="S = N - sigma (N - 1)", parameters=(_SERIAL,), modes=(WEAK,),
        speedup=lambda ranks, p: ranks - p[0] * (ranks - 1),
    ),
    # Gunther 2007, Guerrilla Capacity Planning; sigma: contention, kappa: exchange between all pairs. It is Amdahl's
    # law where kappa = 0.
    ScalingLaw(
        name="USL", formula="S = N / (1 + sigma (N - 1) + kappa N (N - 1))",
        parameters=(_SERIAL, Parameter(name="kappa", start=0.001, low=0.0, high=1.0)),
        speedup=lambda ranks, p: ranks / (1 + p[0] * (ranks - 1) + p[1] * ranks * (ranks - 1)),
        peak=_usl_peak,
    ),
)  # fmt: skip
