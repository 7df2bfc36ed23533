"""Rounds in which every method takes one turn, each round in another order."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parallel.timed.methods import Method
from benchmarks.parallel.timed.programs import Command, Program, Turn
from benchmarks.reduction.places import RanksFailed
from benchmarks.starting import Start

# Of the loss after the warm-up steps, between methods: 16 bits on the wire change it by less, ranks that do not reduce
# by more.
TOLERANCE = 5e-4


class WrongTraining(RuntimeError):
    """A method's loss differs from that of the others, so its time is not valid."""


@dataclass(kw_only=True)
class Rounds:
    """turns: by rate and method, of each round. failed: method -> its error. starts: how the ranks of each method were
    started."""

    turns: dict[str, dict[str, list[Turn]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)


def take_rounds(
    methods: Sequence[Method],
    *,
    command: Callable[[Method, Path, int], Command],
    directory: Path,
    num_ranks: int,
    settings: Mapping[str, Any],
    rates: Mapping[str, Callable[[], None]],
    num_rounds: int,
    seed: int,
    timeout_s: float,
) -> Rounds:
    """Starts all methods, takes rounds at each rate, and ends them.

    command: how to start a method, with its folder and its number. rates: name -> function that sets the links' rate.
    settings: `workload`, `batch`, `warmup` and `steps` of a turn. Raises WrongTraining if they train different things.
    """
    found = Rounds()
    order = random.Random(seed)
    programs: dict[str, Program] = {}
    losses = {}
    try:
        for number, method in enumerate(methods):
            program = Program(
                method, directory / method.name, num_ranks=num_ranks, settings=settings, timeout_s=timeout_s
            )
            programs[method.name] = program
            try:
                losses[method.name], start = program.start(command(method, program.directory, number))
            except RanksFailed as error:
                _drop(method.name, error, programs, found)
                continue
            found.starts.append(start)
        check_losses(losses)
        for rate, set_rate in rates.items():
            set_rate()
            turns: dict[str, list[Turn]] = {name: [] for name in programs}
            for _ in range(num_rounds):
                for name in order.sample(list(programs), len(programs)):
                    try:
                        turns[name].append(programs[name].turn())
                    except RanksFailed as error:
                        _drop(name, error, programs, found)
            found.turns[rate] = {name: turns[name] for name in programs}
    finally:
        for program in programs.values():
            program.end()
    return found


def _drop(name: str, error: RanksFailed, programs: dict[str, Program], found: Rounds) -> None:
    found.failed[name] = str(error)
    programs.pop(name).end()


def check_losses(losses: Mapping[str, float]) -> None:
    """Raises WrongTraining if a method's loss differs from the median of all."""
    if not losses:
        return
    middle = median(losses.values())
    wrong = {name: loss for name, loss in losses.items() if not abs(loss / middle - 1) < TOLERANCE}
    if wrong:
        raise WrongTraining(f"losses after the same steps differ: {wrong}, the others' is {middle}")
