"""Fits scaling laws to the rates of a sweep, with standard errors, and chooses among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import fdtrc

from hpctrain.scaling.statistics.intervals import LEVEL, quantile_of_t

# Laws of scaling: how the rate of a run follows from its number of ranks, with few parameters.


Ranks = NDArray[np.float64]
STRONG = "strong"
WEAK = "weak"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a law: the start value for the fit, and the bounds of meaningful values."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """A law that can be fitted to a sweep.

    Attributes:
        formula: The law as text, where S(N) is the speedup over one rank.
        parameters: The parameters of the law. Every fit has the rate of one rank as a further parameter.
        speedup: A function of an array of numbers of ranks and an array of parameter values, in the order of
            `parameters`. Returns S for each number of ranks.
        modes: The kinds of scaling (`strong`, `weak`) for which the law is meant.
        peak: A function that takes the parameter values by name, and returns the number of ranks with the highest
            rate, or None if the rate grows without limit.
    """

    name: str
    formula: str
    parameters: tuple[Parameter, ...]
    speedup: Callable[[Ranks, NDArray[np.float64]], Ranks]
    modes: tuple[str, ...] = (STRONG, WEAK)
    peak: Callable[[Mapping[str, float]], float | None] = lambda parameters: None


def laws_of(mode: str) -> tuple[ScalingLaw, ...]:
    """Returns the laws for `strong` or `weak` scaling; laws with fewer parameters come first.

    To fit another law, such as a model of the machine, call `fit_laws(..., laws=(*laws_of(mode), mine))`.
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


# Fits of scaling laws to the rates of a sweep, with standard errors, and the choice among them.


# A parameter this close to its bound, as a share of the range, lies on it.
_AT_BOUND = 1e-6
_MISFIT = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedParameter:
    """A parameter's value, its standard error, and its t interval, clipped to the parameter's bounds.

    Error and interval are None in two cases: the parameter is on its bound, where the errors of least squares are
    invalid; or the fit has no degree of freedom.
    """

    name: str
    value: float
    error: float | None
    low: float | None
    high: float | None
    at_bound: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LawFit:
    """A law fitted to the logarithms of all measured rates.

    Attributes:
        rate_1: The rate of one rank, in the unit of the rates.
        residual: The standard deviation of measured / fitted rates around 1, corrected for the degrees of freedom; None
            if the fit has no degree of freedom.
        aicc: Akaike's criterion, corrected for few values; lower is better, and only differences count; None if there
            are too few values.
        checked_by: The number of measured sizes minus the number of fitted parameters, including the rate of one rank.
            If this number is 0, the law passes through any measured means, so that a good fit proves nothing.
        misfit_p: The probability that means are at least this far from the law, if the law holds (F test of the lack of
            fit against the spread of repeats); None if this cannot be tested.
        peak_ranks: The number of ranks with the highest rate; None if the rate grows without limit.
        efficiency: The efficiency that the law gives for each measured number of ranks, relative to the smallest number
            of ranks.
        predicted: The efficiency that the law gives for 2 and 4 times the largest measured number of ranks.
    """

    law: str
    formula: str
    rate_1: float
    parameters: tuple[FittedParameter, ...]
    residual: float | None
    aicc: float | None
    checked_by: int
    misfit_p: float | None
    peak_ranks: float | None
    efficiency: dict[int, float]
    predicted: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("efficiency", "predicted"):
            document[name] = {str(ranks): value for ranks, value in getattr(self, name).items()}
        return document


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoice:
    """All fits, and the law to use.

    chosen: the name of the law; None if there are too few sizes to prefer a law, or if the measurements contradict all
    laws. why: the reason as text.
    """

    fits: tuple[LawFit, ...]
    chosen: str | None
    why: str

    def as_json(self) -> dict[str, Any]:
        return {"chosen": self.chosen, "why": self.why, "laws": [fit.as_json() for fit in self.fits]}


def fit_laws(
    rates: Mapping[int, Sequence[float]],
    *,
    mode: str,
    laws: Sequence[ScalingLaw] | None = None,
    level: float = LEVEL,
) -> FitChoice:
    """Fits the laws to the rates of all repeats, and chooses one by AICc.

    Args:
        rates: For each number of ranks, the samples/s of every repeat.
        mode: `strong` or `weak`.
        laws: The laws to fit; None: all laws for the mode. A law is left out if it has more parameters, including the
            rate of one rank, than there are numbers of ranks.
        level: The confidence level of the intervals.

    Raises ValueError if there is no rate.
    """
    if not rates or not all(rates.values()):
        raise ValueError("no rates to fit")
    ranks = np.array([n for n, found in sorted(rates.items()) for _ in found], dtype=np.float64)
    logs = np.log(np.array([rate for _, found in sorted(rates.items()) for rate in found]))
    fits = tuple(
        _fit(law, ranks, logs, level=level)
        for law in (laws_of(mode) if laws is None else laws)
        if len(law.parameters) + 1 <= len(rates)
    )
    return _choose(fits, num_sizes=len(rates))


def _fit(law: ScalingLaw, ranks: NDArray[np.float64], logs: NDArray[np.float64], *, level: float) -> LawFit:
    low = np.array([p.low for p in law.parameters])
    high = np.array([p.high for p in law.parameters])

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[0] + np.log(np.maximum(law.speedup(ranks, values[1:]), 1e-300)) - logs

    start = np.array([p.start for p in law.parameters])
    first = -float(np.mean(residuals(np.concatenate([[0.0], start]))))
    found = least_squares(
        residuals,
        np.concatenate([[first], start]),
        bounds=(np.concatenate([[-np.inf], low]), np.concatenate([[np.inf], high])),
        x_scale="jac",
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    count, num_parameters = len(logs), len(found.x)
    freedom = count - num_parameters
    squares = float(np.sum(found.fun**2))
    values = found.x[1:]
    near = _AT_BOUND * (high - low)
    at_bound = (values - low <= near) | (high - values <= near)
    errors = _errors(found.jac, np.concatenate([[False], at_bound]), squares=squares, freedom=freedom)[1:]
    parameters = []
    for place, parameter in enumerate(law.parameters):
        error = None if at_bound[place] or math.isnan(errors[place]) else float(errors[place])
        half = None if error is None else quantile_of_t(level, freedom) * error
        parameters.append(
            FittedParameter(
                name=parameter.name,
                value=float(values[place]),
                error=error,
                low=None if half is None else max(parameter.low, float(values[place]) - half),
                high=None if half is None else min(parameter.high, float(values[place]) + half),
                at_bound=bool(at_bound[place]),
            )
        )
    sizes = sorted({int(n) for n in ranks})
    beyond = [2 * sizes[-1], 4 * sizes[-1]]
    speedup = law.speedup(np.array([*sizes, *beyond], dtype=np.float64), values)
    efficiency = {
        n: float(s / n / (speedup[0] / sizes[0])) for n, s in zip([*sizes, *beyond], speedup, strict=True)
    }
    return LawFit(
        law=law.name,
        formula=law.formula,
        rate_1=math.exp(found.x[0]),
        parameters=tuple(parameters),
        residual=math.sqrt(squares / freedom) if freedom > 0 else None,
        aicc=_aicc(squares, count=count, num_parameters=num_parameters),
        checked_by=len(sizes) - num_parameters,
        misfit_p=_misfit(ranks, logs, squares=squares, num_parameters=num_parameters),
        peak_ranks=law.peak({p.name: p.value for p in parameters}),
        efficiency={n: efficiency[n] for n in sizes},
        predicted={n: efficiency[n] for n in beyond},
    )


def _errors(
    jacobian: NDArray[np.float64], fixed: NDArray[np.bool_], *, squares: float, freedom: int
) -> NDArray[np.float64]:
    """Returns the standard errors of the parameters that are not `fixed`; NaN for the others."""
    errors = np.full(len(fixed), np.nan)
    free = jacobian[:, ~fixed]
    if freedom > 0:
        covariance = np.linalg.pinv(free.T @ free) * squares / freedom
        errors[~fixed] = np.sqrt(np.diag(covariance))
    return errors


def _aicc(squares: float, *, count: int, num_parameters: int) -> float | None:
    """Returns AICc, in which the variance also counts as a parameter; None if there are too few values.

    Source: Hurvich and Tsai 1989, doi:10.1093/biomet/76.2.297.
    """
    estimated = num_parameters + 1
    if count <= estimated + 1:
        return None
    # Repeats that agree to the last bit would give minus infinity.
    likelihood = count * math.log(max(squares / count, 1e-24))
    return likelihood + 2 * estimated + 2 * estimated * (estimated + 1) / (count - estimated - 1)


def _misfit(
    ranks: NDArray[np.float64], logs: NDArray[np.float64], *, squares: float, num_parameters: int
) -> float | None:
    sizes = np.unique(ranks)
    pure = float(sum(np.sum((logs[ranks == n] - logs[ranks == n].mean()) ** 2) for n in sizes))
    of_means, of_repeats = len(sizes) - num_parameters, len(logs) - len(sizes)
    if of_means < 1 or of_repeats < 1:
        return None
    lack = max(0.0, squares - pure)
    if pure == 0:
        return 1.0 if lack == 0 else 0.0
    return float(fdtrc(of_means, of_repeats, lack / of_means / (pure / of_repeats)))


def _choose(fits: tuple[LawFit, ...], *, num_sizes: int) -> FitChoice:
    """Chooses the law with the lowest AICc among those with fewer parameters than sizes.

    Chooses no law if the means contradict that law.
    """
    known = [fit for fit in fits if fit.aicc is not None and fit.checked_by >= 1]
    if not known:
        return FitChoice(
            fits=fits, chosen=None,
            why=f"{num_sizes} size{'s' * (num_sizes > 1)} cannot tell laws apart: measure at least three",
        )  # fmt: skip
    ordered = sorted(known, key=lambda fit: fit.aicc or 0.0)
    best = ordered[0]
    close = [fit.law for fit in ordered[1:] if (fit.aicc or 0.0) - (best.aicc or 0.0) < 2]
    parts = [
        f"lowest AICc, checked by {best.checked_by} size{'s' * (best.checked_by > 1)} more than it has parameters"
    ]
    if close:
        parts.append(f"{', '.join(close)} explain{'s' * (len(close) == 1)} the rates as well (AICc within 2)")
    left_out = [fit.law for fit in fits if fit not in known]
    if left_out:
        parts.append(f"{', '.join(left_out)}: {num_sizes} sizes are too few to check it")
    chosen: str | None = best.law
    if best.misfit_p is not None and best.misfit_p < _MISFIT:
        chosen = None
        parts.insert(
            0, f"the sizes' means differ from every law by more than the repeats' noise; closest: {best.law}"
        )
    return FitChoice(fits=fits, chosen=chosen, why="; ".join(parts))
