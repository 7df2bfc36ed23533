"""Rounds in which every method takes one turn, each round in another order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parallel.timed.methods import Method
from benchmarks.parallel.timed.programs import Command, Program, Turn
from benchmarks.places import RanksFailed
from benchmarks.starting import Start

# Of the loss after the warm-up steps, between methods: 16 bits on the wire change it by less, ranks that do not reduce
# by more.
TOLERANCE = 5e-4
# Free memory without which a method is not started: of each of its ranks, and of the machine besides.
RANK_BYTES = 350_000_000
_REST_BYTES = 1_000_000_000


@dataclass(kw_only=True)
class Rounds:
    """turns: by rate and method, of each round. failed: method -> its error. starts: how the ranks of each method were
    started."""

    turns: dict[str, dict[str, list[Turn]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TurnTaking:
    """How methods take turns.

    command: how to start a method, with its folder and its number. directory: in which each method has a folder.
    settings: `workload`, `batch`, `warmup` and `steps` of a turn. rates: name -> function that sets the links' rate.
    timeout_s: of a start and of a turn. idle_s: ranks that wait longer end.
    """

    command: Callable[[Method, Path, int], Command]
    directory: Path
    num_ranks: int
    settings: Mapping[str, Any]
    rates: Mapping[str, Callable[[], None]]
    num_rounds: int
    seed: int
    timeout_s: float
    idle_s: float


def take_rounds(groups: Sequence[Sequence[Method]], turns: TurnTaking) -> Rounds:
    """Starts the methods of a group, takes rounds at each rate, and ends them; then those of the next group.

    A method that fails, trains something else than the others, or would need memory that is not there is left out and
    named in `failed`; the others go on.
    """
    found = Rounds(turns={rate: {} for rate in turns.rates})
    losses: dict[str, float] = {}
    order, numbers = random.Random(turns.seed), count()
    for methods in groups:
        programs: dict[str, Program] = {}
        try:
            for method in methods:
                _start(
                    method, turns, number=next(numbers), programs=programs, losses=losses, found=found
                )  # fmt: skip
            for name, error in wrong_losses(losses).items():
                if name in programs:
                    _drop(name, error, programs, found)
            for rate, set_rate in turns.rates.items():
                set_rate()
                taken: dict[str, list[Turn]] = {name: [] for name in programs}
                for _ in range(turns.num_rounds):
                    for name in order.sample(list(programs), len(programs)):
                        try:
                            taken[name].append(programs[name].turn())
                        except RanksFailed as error:
                            _drop(name, str(error), programs, found)
                found.turns[rate] |= {name: taken[name] for name in programs}
        finally:
            for program in programs.values():
                program.end()
    return found


def _start(
    method: Method,
    turns: TurnTaking,
    *,
    number: int,
    programs: dict[str, Program],
    losses: dict[str, float],
    found: Rounds,
) -> None:
    """Starts a method, and adds its program, loss and start, or its failure."""
    if missing := missing_memory(Path("/proc/meminfo").read_text(), num_ranks=turns.num_ranks):
        found.failed[method.name] = missing
        return
    program = Program(
        method, turns.directory / method.name, num_ranks=turns.num_ranks, settings=turns.settings,
        timeout_s=turns.timeout_s, idle_s=turns.idle_s,
    )  # fmt: skip
    programs[method.name] = program
    try:
        losses[method.name], start = program.start(turns.command(method, program.directory, number))
    except RanksFailed as error:
        _drop(method.name, str(error), programs, found)
        return
    found.starts.append(start)


def _drop(name: str, error: str, programs: dict[str, Program], found: Rounds) -> None:
    found.failed[name] = error
    programs.pop(name).end()


def missing_memory(meminfo: str, *, num_ranks: int) -> str:
    """Returns why so many ranks are not started, if memory is short; otherwise an empty text.

    meminfo: of Linux. A machine without free memory ends any process, not only the one that asks for more.
    """
    available = next(line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    free, needed = 1024 * int(available), num_ranks * RANK_BYTES + _REST_BYTES
    if free >= needed:
        return ""
    return f"not started: {num_ranks} ranks need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def wrong_losses(losses: Mapping[str, float]) -> dict[str, str]:
    """Returns the methods whose loss differs from the median of all, so that their times are not valid, and why."""
    if not losses:
        return {}
    # Without NaN, whose place in a sorted list depends on the version of Python.
    middle = median([loss for loss in losses.values() if loss == loss] or [math.nan])
    return {
        name: f"its loss is {loss} after the same steps, that of others {middle}"
        for name, loss in losses.items()
        if not abs(loss / middle - 1) < TOLERANCE
    }
