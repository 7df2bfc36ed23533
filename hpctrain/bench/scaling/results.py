"""Computes the results of a scaling sweep from its runs. Pure functions.

The results of each number of ranks are the rate, the speedup, the efficiency and the parts of a step. Also fits the
scaling laws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from hpctrain.bench.figures import spread_of
from hpctrain.bench.scaling.sweep import PARTS, ScalingRun, SizeResult
from hpctrain.scaling import FitChoice, fit_laws, paired_ratio


def size_results(
    runs: Sequence[ScalingRun], *, baseline_ranks: int, shared: Callable[[int], bool]
) -> list[SizeResult]:
    """Returns the results of each number of ranks, ascending. Rounds without a run of the baseline do not count.

    shared: a function that takes a number of ranks, and returns True if that many ranks have to share cores.
    """
    by_ranks: dict[int, dict[int, ScalingRun]] = {}
    for run in runs:
        by_ranks.setdefault(run.ranks, {})[run.round] = run
    baseline = by_ranks.get(baseline_ranks, {})
    found = []
    for ranks, by_round in sorted(by_ranks.items()):
        rounds = sorted(by_round.keys() & baseline.keys())
        if rounds:
            mine = [by_round[number] for number in rounds]
            theirs = [baseline[number] for number in rounds]
            found.append(_size_result(mine, theirs, shared=shared(ranks)))
    return found


def fits_of(runs: Sequence[ScalingRun], *, mode: str) -> FitChoice | None:
    """Returns the scaling laws, fitted to the samples/s of all runs; None with fewer than two numbers of ranks."""
    rates: dict[int, list[float]] = {}
    for run in runs:
        rates.setdefault(run.ranks, []).append(run.samples_per_s)
    return fit_laws(rates, mode=mode) if len(rates) > 1 else None


def _size_result(runs: Sequence[ScalingRun], baseline: Sequence[ScalingRun], *, shared: bool) -> SizeResult:
    rates, theirs = [run.samples_per_s for run in runs], [run.samples_per_s for run in baseline]
    speedup = paired_ratio(rates, theirs)
    if runs[0].ranks == baseline[0].ranks:
        speedup = replace(speedup, low=None, high=None, least=None, greatest=None, range_level=None)
    efficiency = speedup.scaled(baseline[0].ranks / runs[0].ranks)
    return SizeResult(
        ranks=runs[0].ranks,
        nodes=max(run.nodes for run in runs),
        global_batch=runs[0].global_batch,
        repeats=len(runs),
        samples_per_s=spread_of(rates).as_json(),
        step_s=spread_of([seconds for run in runs for seconds in run.step_s]).as_json(),
        efficiency=efficiency.as_json(),
        speedup=speedup.as_json(),
        seconds=_seconds_of_a_step(runs),
        shared_cores=shared,
    )


def _seconds_of_a_step(runs: Sequence[ScalingRun]) -> dict[str, float]:
    """Returns the seconds of a step by name, as means over ranks and runs. `other` is the rest that no part covers."""
    means = {
        name: fmean(
            fmean(rank.seconds.get(name, 0.0) for rank in run.by_rank) / len(run.step_s) for run in runs
        )
        for name in (*PARTS, "step")
    }
    return {**means, "other": max(0.0, means["step"] - sum(means[name] for name in PARTS))}
