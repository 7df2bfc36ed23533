"""Checks that the runs of a sweep trained on the same samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.bench.scaling.document import Mode, SamplesCheck, ScalingRun
from hpctrain.errors import DataError

_RULES = {
    "strong": "every run had the same samples in each step, on every number of ranks",
    "weak": "runs on the same number of ranks had the same samples in each step; the global batch grows with the ranks",
}


def check_samples(runs: Sequence[ScalingRun], *, mode: Mode) -> SamplesCheck | None:
    """Compares the hashes of the samples of each measured step; None without runs.

    In strong scaling all runs must agree; in weak scaling those on the same number of ranks. Raises DataError that
    names the runs and the step if they do not: then their times are of different work.
    """
    first: dict[int, ScalingRun] = {}
    for run in runs:
        other = first.setdefault(run.ranks if mode == "weak" else 0, run)
        if run.sample_sums == other.sample_sums:
            continue
        step = next(
            (
                n
                for n, pair in enumerate(zip(run.sample_sums, other.sample_sums, strict=False))
                if len({*pair}) > 1
            ),
            min(len(run.sample_sums), len(other.sample_sums)),
        )
        raise DataError(
            f"the run on {run.ranks} ranks (round {run.round + 1}) did not train on the same samples as the one on "
            f"{other.ranks} ranks (round {other.round + 1}): they differ in measured step {step + 1}. Was the dataset "
            "changed, or does the data's order depend on the number of ranks?"
        )
    if not runs:
        return None
    return SamplesCheck(rule=_RULES[mode], runs=len(runs), steps=len(runs[0].sample_sums))
