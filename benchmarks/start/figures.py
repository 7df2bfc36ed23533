"""Converts measurements to records and defines their bars. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median, quantiles

from benchmarks.results_file import Record, over_rounds
from benchmarks.start.kinds import NAMES, NOTHING, UP, WITHOUT
from benchmarks.start.memory import Memory
from benchmarks.start.paths import Operations
from benchmarks.start.ranks import INIT
from benchmarks.start.runs import Compared

# Of the project's goals. Numbers of ranks that have none may not be slower.
LEAST_TIMES = {NOTHING: {8: 3.0, 48: 8.0}, UP: {2: 2.5, 8: 6.0}}
NO_SLOWER = 1.0
MOST_CPU_S = 0.12
MOST_OPERATIONS = 1.0
MOST_MEMORY = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Returns median and quartiles; of a single value all three are that one."""
    if len(values) == 1:
        return Spread(low=values[0], median=values[0], high=values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(low=low, median=middle, high=high)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Returns the ratio of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def slope(values: Mapping[int, float]) -> float:
    """Returns what a further rank adds: slope of the least-squares line. values: by number of ranks; of one 0."""
    return linear_regression(list(values), list(values.values())).slope if len(values) > 1 else 0.0


def epoch_records(found: Sequence[Compared]) -> list[Record]:
    """Returns the records of figures 1 and 5."""
    records = []
    for kind in (NOTHING, UP):
        for one in found:
            without, forked = one.seconds[WITHOUT], one.seconds[kind]
            records.append(
                Record(
                    id=f"start.1.{kind}.{one.num_ranks}",
                    what=f"{_ranks(one.num_ranks)}, {NAMES[kind]}: times as fast as without, command to end",
                    value=median(ratios(without, forked)), bar=LEAST_TIMES[kind].get(one.num_ranks, NO_SLOWER),
                    sense="at least", unit="", samples={"without_s": without, "forked_s": forked},
                    **over_rounds(without, forked),
                )
            )  # fmt: skip
    num_runs = sum(one.num_runs for one in found)
    records.append(
        Record(
            id="start.5",
            what=f"of {num_runs} runs those whose last line, or a record of a step or evaluation of a rank, differs "
            "in any digit from the first run without a fork server",
            value=sum(len(one.differing) for one in found), bar=0, sense="at most", unit="runs",
            samples={
                one.num_ranks: {
                    "runs": one.num_runs, "records": one.num_records, "loss": one.loss, "differing": one.differing
                }
                for one in found
            },
        )
    )  # fmt: skip
    return records


def processor_records(found: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> list[Record]:
    """Returns the record of figure 2. found: see `runs.processor_seconds`."""
    every = {
        end: {kind: further_rank(by_ranks) for kind, by_ranks in kinds.items()}
        for end, kinds in found.items()
    }
    further = every[INIT]
    return [
        Record(
            id="start.2",
            what="processor seconds that a further rank costs until it has started MPI, with a fork server; without: "
            f"{median(further[WITHOUT]):.2f}",
            value=median(further[NOTHING]), bar=MOST_CPU_S, sense="at most", unit="s",
            samples={"further_s": every, "cpu_s": found}, rounds=len(further[NOTHING]),
            range=(min(further[NOTHING]), max(further[NOTHING])),
        )
    ]  # fmt: skip


def further_rank(by_ranks: Mapping[int, Sequence[float]]) -> list[float]:
    """Returns the slope of each round."""
    rounds = min(map(len, by_ranks.values()))
    return [
        slope({num_ranks: values[number] for num_ranks, values in by_ranks.items()})
        for number in range(rounds)
    ]


def path_records(found: Mapping[str, Mapping[int, Operations]]) -> list[Record]:
    """Returns the record of figure 3. found: kind -> number of ranks, with 1 -> operations."""
    most = max(found[NOTHING])
    return [
        Record(
            id="start.3",
            what=f"path operations in the environment during a start of {_ranks(most)} with a fork server, of those of "
            "one rank without",
            value=found[NOTHING][most].count / found[WITHOUT][1].count, bar=MOST_OPERATIONS, sense="at most", unit="",
            samples={kind: {n: asdict(one) for n, one in by_ranks.items()} for kind, by_ranks in found.items()},
        )
    ]  # fmt: skip


def memory_records(found: Mapping[str, Sequence[Memory]], *, num_ranks: int, steps: int) -> list[Record]:
    """Returns the record of figure 4. found: kind -> of each round."""
    without, forked = ([one.total for one in found[kind]] for kind in (WITHOUT, NOTHING))
    return [
        Record(
            id="start.4",
            what=f"memory (PSS) of {_ranks(num_ranks)} after {steps} steps with a fork server, with that of server "
            "and clients, of that without",
            value=median(ratios(forked, without)), bar=MOST_MEMORY, sense="at most", unit="",
            samples={kind: [asdict(one) for one in rounds] for kind, rounds in found.items()},
            **over_rounds(forked, without),
        )
    ]  # fmt: skip


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def digits(value: float, *, count: int = 3) -> str:
    """Returns a number with so many digits that count, without an exponent."""
    places = max(0, count - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{places}f}"
