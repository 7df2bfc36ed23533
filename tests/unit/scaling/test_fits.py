"""Laws of scaling are found in rates made from them, with errors that hold, and are refused where sizes are too few."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.scaling import FitChoice, LawFit, Parameter, ScalingLaw, fit_laws, laws_of

SIZES = (1, 2, 4, 8, 16)


def usl(ranks: int, sigma: float, kappa: float) -> float:
    return 100 * ranks / (1 + sigma * (ranks - 1) + kappa * ranks * (ranks - 1))


def noisy(
    rates: dict[int, float], *, noise: float, repeats: int, generator: np.random.Generator
) -> dict[int, list[float]]:
    return {n: list(rate * np.exp(generator.normal(0, noise, repeats))) for n, rate in rates.items()}


def law(found: FitChoice, name: str) -> LawFit:
    return next(fit for fit in found.fits if fit.law == name)


def test_usl_is_recovered_and_its_intervals_cover_the_truth() -> None:
    generator = np.random.default_rng(1)
    truth = {n: usl(n, 0.08, 0.004) for n in SIZES}
    covered = 0
    for _ in range(200):
        found = law(fit_laws(noisy(truth, noise=0.04, repeats=5, generator=generator), mode="strong"), "USL")
        sigma, kappa = found.parameters
        assert sigma.low is None or sigma.value == pytest.approx(0.08, abs=0.08)
        covered += kappa.low is not None and kappa.high is not None and kappa.low <= 0.004 <= kappa.high
    assert covered / 200 > 0.9
    exact = law(fit_laws(noisy(truth, noise=1e-6, repeats=5, generator=generator), mode="strong"), "USL")
    assert [p.value for p in exact.parameters] == pytest.approx([0.08, 0.004], rel=1e-3)
    assert exact.peak_ranks == pytest.approx((0.92 / 0.004) ** 0.5, rel=1e-3)
    assert exact.rate_1 == pytest.approx(100, rel=1e-4)
    assert exact.efficiency[16] == pytest.approx(usl(16, 0.08, 0.004) / 1600, rel=1e-4)
    assert exact.predicted[64] == pytest.approx(usl(64, 0.08, 0.004) / 6400, rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "rates", "chosen"),
    [
        ("strong", {n: 100.0 * n for n in SIZES}, "linear"),
        ("strong", {n: usl(n, 0.1, 0.0) for n in SIZES}, "Amdahl"),
        ("strong", {n: usl(n, 0.05, 0.01) for n in SIZES}, "USL"),
        ("weak", {n: 100 * (n - 0.2 * (n - 1)) for n in SIZES}, "Gustafson"),
    ],
)
def test_the_law_that_made_the_rates_is_chosen(mode: str, rates: dict[int, float], chosen: str) -> None:
    generator = np.random.default_rng(2)
    found = fit_laws(noisy(rates, noise=0.01, repeats=6, generator=generator), mode=mode)
    assert found.chosen == chosen
    best = law(found, chosen)
    assert best.residual == pytest.approx(0.01, rel=0.5)
    assert best.misfit_p is not None
    assert best.misfit_p > 0.01
    assert {fit.law for fit in found.fits} == {one.name for one in laws_of(mode)}


def test_a_parameter_on_its_bound_has_no_error() -> None:
    generator = np.random.default_rng(3)
    superlinear = noisy({n: 100 * n**1.1 for n in SIZES}, noise=0.01, repeats=5, generator=generator)
    (sigma,) = law(fit_laws(superlinear, mode="strong"), "Amdahl").parameters
    assert (sigma.at_bound, sigma.error, sigma.low, sigma.value) == (
        True,
        None,
        None,
        pytest.approx(0, abs=1e-6),
    )


def test_means_that_no_law_describes_are_named() -> None:
    generator = np.random.default_rng(4)
    steps = {1: 100.0, 2: 190.0, 4: 200.0, 8: 700.0, 16: 720.0}
    found = fit_laws(noisy(steps, noise=0.01, repeats=5, generator=generator), mode="strong")
    assert found.chosen is None
    assert "the sizes' means differ from every law by more than the repeats' noise; closest: " in found.why


def test_two_sizes_choose_nothing_that_they_cannot_check() -> None:
    found = fit_laws({1: [100.0, 101.0, 99.0], 2: [180.0, 182.0, 181.0]}, mode="strong")
    assert {fit.law: fit.checked_by for fit in found.fits} == {"linear": 1, "Amdahl": 0}
    assert found.chosen is None
    assert "Amdahl: 2 sizes are too few to check it" in found.why
    assert "closest: linear" in found.why
    assert fit_laws({1: [100.0, 101.0, 99.0], 2: [199.0, 201.0, 200.0]}, mode="strong").chosen == "linear"
    alone = fit_laws({2: [1.0, 1.1, 1.2]}, mode="weak")
    assert (alone.chosen, [fit.law for fit in alone.fits]) == (None, ["linear"])
    assert "measure at least three" in alone.why
    single = fit_laws({1: [100.0], 2: [180.0]}, mode="strong")
    assert law(single, "Amdahl").residual is None
    with pytest.raises(ValueError):
        fit_laws({}, mode="strong")


def test_another_law_is_fitted_beside_them() -> None:
    """Such as a model of the machine: the time of an all-reduce, which grows with the logarithm of the ranks."""
    tree = ScalingLaw(
        name="tree", formula="S = N / (1 + c log2 N)",
        parameters=(Parameter(name="c", start=0.1, low=0.0, high=10.0),),
        speedup=lambda ranks, p: ranks / (1 + p[0] * np.log2(ranks)),
    )  # fmt: skip
    generator = np.random.default_rng(5)
    rates = {n: 100 * n / (1 + 0.3 * np.log2(n)) for n in SIZES}
    found = fit_laws(
        noisy(rates, noise=0.01, repeats=5, generator=generator),
        mode="strong",
        laws=(*laws_of("strong"), tree),
    )
    assert found.chosen == "tree"
    assert law(found, "tree").parameters[0].value == pytest.approx(0.3, rel=0.1)
    assert found.as_json()["laws"][-1]["predicted"]["64"] == pytest.approx(1 / 2.8, rel=0.1)
