"""Times `auto` and every fixed choice, size by size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.reduction.ours import name_of, our_method
from benchmarks.reduction.timing import Ranks
from hpctrain.run import Session

# A sample of a small bucket is the mean over as many calls as fit into this time.
SAMPLE_S = 0.06
MAX_REPEATS = 400
# After the first rounds only choices within this factor of the best are timed further. Below CARRIED_NUMEL elements all
# choices are timed again at the next size; from there on only the remaining ones, as times grow in proportion.
CONTENDER = 1.6
FIRST_ROUNDS = 2
CARRIED_NUMEL = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """numels: ascending. budget_s: time for one size; no round begins later, except the first FIRST_ROUNDS + 1.

    calibration: path of a file that does not exist: `auto` measures once, as in a run, and reads it for each size.
    """

    choices: Sequence[tuple[str, str]]
    auto: tuple[str, str]
    numels: Sequence[int]
    num_rounds: int
    budget_s: float
    seed: int
    calibration: Path


def run_sweep(ranks: Ranks, session: Session, sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Returns for each number of elements: `times`, seconds by choice, and `runs`, what `auto` chose. Collective."""
    order = random.Random(sweep.seed)
    auto = name_of(*sweep.auto)
    contenders = list(sweep.choices)
    found: dict[str, dict[str, Any]] = {}
    for numel in sweep.numels:
        times, runs = _one_size(ranks, session, sweep, numel=numel, choices=contenders, order=order)
        found[str(numel)] = {"times": times, "runs": runs}
        if numel >= CARRIED_NUMEL:
            near = _near_the_best(times, auto=auto)
            contenders = [choice for choice in contenders if name_of(*choice) in near]
    return found


def _one_size(
    ranks: Ranks,
    session: Session,
    sweep: Sweep,
    *,
    numel: int,
    choices: Sequence[tuple[str, str]],
    order: random.Random,
) -> tuple[dict[str, list[float]], str]:
    methods = [
        our_method(session, numel=numel, algorithm=name, wire=wire, calibration=sweep.calibration)
        for name, wire in (sweep.auto, *choices)
    ]
    values, zeros = ranks.values(numel), torch.zeros(numel)
    repeats = {}
    for method in methods:
        method.fill(values)
        method.reduce()
        ranks.check(method, numel=numel)
        method.fill(zeros)  # repeated sums would overflow
        repeats[method.name] = max(1, min(MAX_REPEATS, int(SAMPLE_S / ranks.slowest_s(method))))
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    active, spent_s = methods, 0.0
    for round_number in range(sweep.num_rounds):
        if round_number == FIRST_ROUNDS:
            near = _near_the_best(times, auto=name_of(*sweep.auto))
            active = [method for method in methods if method.name in near]
        if round_number > FIRST_ROUNDS and spent_s > sweep.budget_s:
            break
        for method in order.sample(active, len(active)):
            seconds = ranks.slowest_s(method, repeats=repeats[method.name])
            times[method.name].append(seconds)
            spent_s += seconds * repeats[method.name]
    for method in methods:
        method.close()
    return times, methods[0].runs


def _near_the_best(times: dict[str, list[float]], *, auto: str) -> set[str]:
    best = min(min(seconds) for name, seconds in times.items() if name != auto)
    return {name for name, seconds in times.items() if name == auto or min(seconds) <= CONTENDER * best}
