"""Whole training steps of the recipes in `examples/`, unchanged: the default compared with every backend and algorithm,
and with plain Horovod."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.harness import Bench, NotHere, Part, Suite
from benchmarks.results_file import Record, ratio_record
from benchmarks.results_page import spread
from benchmarks.step.runs import (
    FULL,
    QUICK,
    Found,
    OnCluster,
    OneNode,
    measure,
    plain,
    working_directory,
)
from benchmarks.step.variants import (
    ALONE,
    CELLS,
    DEFAULT,
    FLAT,
    ONE_RANK,
    ONE_THREAD,
    PEER,
    PEERS_AS_THEY_COME,
    PEERS_AT_THEIR_BEST,
    YIELDING_PEER,
    Cell,
    finalists,
    named_pair,
)

Rounds = Sequence[dict[str, float]]  # of each round: samples/s by variant

DEFAULT_BAR = 0.97
HOROVOD_BAR = 0.95
FLAT_BAR = 0.95
SCALING_BAR = 1.7
LIMIT_BAR = 0.92
BEST_PEER_BAR = 1.1
PEER_BAR = 1.3


class NotMeasured(ValueError):
    """Measurements of a variant that a figure needs are missing."""


def paired(rounds: Rounds, *, of: str, to: str) -> list[float]:
    """Returns for each round samples/s of `of` / samples/s of `to`. Raises NotMeasured if a round lacks one of them."""
    ratios = [one[of] / one[to] for one in rounds if of in one and to in one]
    if not ratios or len(ratios) < len(rounds):
        missing = [name for name in (of, to) if any(name not in one for one in rounds)]
        raise NotMeasured(f"no samples/s in every round of: {', '.join(missing) or of}")
    return ratios


def rates_of(rounds: Rounds) -> dict[str, list[float]]:
    """Returns variant -> samples/s of the rounds in which it took part."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: [one[name] for one in rounds if name in one] for name in names}


def best_of(rounds: Rounds, names: Sequence[str]) -> str:
    """Returns the variant of `names` with the highest median. Raises NotMeasured if none of them was measured."""
    rates = {name: median(values) for name, values in rates_of(rounds).items() if name in names}
    if not rates:
        raise NotMeasured(f"no samples/s of any of: {', '.join(names)}")
    return max(rates, key=lambda name: rates[name])


def records_of(cell: Cell, found: Found) -> list[Record]:
    """Returns a cell's records at one link rate. A record that lacks a variant has value 0 and does not hold."""
    stem = f"{cell.figure}.{found.rate}" if found.rate is not None else cell.figure
    where = f"{cell.recipe}, {_ranks(cell)}" + (f", {found.rate}" if found.rate is not None else "")
    over_horovod, over_mpi = named_pair()
    of_several = (
        ("horovod", f"our sums, {over_horovod} / {over_mpi}", HOROVOD_BAR, over_horovod, [over_mpi]),
        ("flat", f"{FLAT} / the better {PEER}", FLAT_BAR, FLAT, [PEER, YIELDING_PEER]),
        ("best-peer", "the default / the best peer at its best", BEST_PEER_BAR, DEFAULT, PEERS_AT_THEIR_BEST),
        ("peer", "the default / the best peer as it comes", PEER_BAR, DEFAULT, PEERS_AS_THEY_COME),
    )
    of_two = (
        ("scaling", "the default / one rank with one thread", SCALING_BAR, DEFAULT, [ONE_THREAD]),
        ("scaling.limit", f"the default / {ALONE}", LIMIT_BAR, DEFAULT, [ALONE]),
        ("scaling.cores", f"{ALONE} / one rank with one thread", SCALING_BAR, ALONE, [ONE_THREAD]),
        ("scaling.all-cores", "the default / one rank with all cores", 1.0, DEFAULT, [ONE_RANK]),
    )
    rows = [*(of_several if cell.num_ranks > 1 else ()), *(of_two if cell.num_ranks == 2 else ())]
    made = [
        _default(cell, found, stem=stem, where=where),
        *(
            _ratio(found, f"{stem}.{name}", f"{where}: {what}", bar, of=of, to=to)
            for name, what, bar, of, to in rows
        ),
    ]
    if found.failed:
        made.append(_failures(f"{stem}.failed", f"{where}: variants that ended with an error", found.failed))
    return made


def failed_record(cell: Cell, error: str) -> Record:
    """Returns the record of a cell that could not be measured. It replaces the records of earlier commits."""
    return _failures(
        f"{cell.figure}.failed", f"{cell.recipe}, {_ranks(cell)}: could not be measured", {"all": error}
    )


def _default(cell: Cell, found: Found, *, stem: str, where: str) -> Record:
    """Returns the record that compares the default with the better finalist. It uses the rounds only, since the
    finalists were selected by the screening."""
    named = finalists(cell, found.screening)
    record = _ratio(found, f"{stem}.default", f"{where}: the default / the best that can be named", DEFAULT_BAR,
                    of=DEFAULT, to=named)  # fmt: skip
    best = max(named, key=lambda name: median(rates_of(found.rounds).get(name, [0.0])), default="")
    if found.runs.get(DEFAULT) and found.runs.get(DEFAULT) == found.runs.get(best):
        record = replace(
            record, what=f"{record.what}; both ran {found.runs[best]}, so the difference is noise"
        )
    samples = {
        **record.samples,
        "all samples/s": rates_of(found.rounds),
        "screening samples/s": found.screening,
        "finalists": named,
        "ran": found.runs,
        "started": found.started,
        "variables": found.variables,
    }
    return replace(record, samples=samples)


def _ratio(found: Found, name: str, what: str, bar: float, *, of: str, to: Sequence[str]) -> Record:
    """Returns the record of `of` / the best of `to`: the median of the rounds' ratios; the text has their range."""
    unit = "samples/samples"
    try:
        other = best_of(found.rounds, to)
        ratios = paired(found.rounds, of=of, to=other)
    except NotMeasured as missing:
        return Record(id=name, what=f"{what}: not measured: {missing}", value=0.0, bar=bar, sense="at least", unit=unit,
                      samples={})  # fmt: skip
    rates = rates_of(found.rounds)
    shown = f"{median(rates[of]):,.0f} / {median(rates[other]):,.0f} ({other}); rounds {min(ratios):.3f} to "
    shown += f"{max(ratios):.3f}"
    samples = {"ratios": ratios, of: rates[of], other: rates[other]}
    return ratio_record(
        name, f"{what}: {shown}", rates[of], rates[other], bar=bar, unit=unit, samples=samples
    )


def _failures(name: str, what: str, failed: dict[str, str]) -> Record:
    what = f"{what}: {', '.join(failed)}"
    return Record(
        id=name, what=what, value=float(len(failed)), bar=0.0, sense="at most", unit="failures", samples=failed,
    )  # fmt: skip


def _ranks(cell: Cell) -> str:
    if cell.on_cluster:
        return cell.name.rpartition("-")[2].replace("x", " x ") + " ranks"
    return f"{cell.num_ranks} rank{'s' if cell.num_ranks > 1 else ''}"


# ---------------------------------------------------------------------- the page


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables with all variants, and how those of a cell's first link rate were started."""
    found = {}
    others = {f"{cell.name}.{rate}" for cell in CELLS.values() for rate in cell.rates[1:]}
    for record in content["records"]:
        place, _, last = record["id"].removeprefix("step.").rpartition(".")
        if last == "default" and "screening samples/s" in record["samples"]:
            found[f"all.{place}"] = all_variants(record["samples"])
            if place not in others:
                found[f"started.{place}"] = started(record["samples"])
    return found


def all_variants(samples: Mapping[str, Any]) -> str:
    """Returns a table of all variants, fastest first: those with rounds by their median, then the others by their
    screening turn."""
    rounds, screening = samples["all samples/s"], samples["screening samples/s"]

    def place(name: str) -> tuple[bool, float]:
        return name not in rounds, -(median(rounds[name]) if name in rounds else screening[name])

    rows = [
        "| | what ran | samples/s, median | least | most | in the screening |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted(screening, key=place):
        three = " | ".join(spread(rounds[name], ",.0f")) if name in rounds else " | | "
        rows.append(f"| {name} | {samples['ran'].get(name, '')} | {three} | {screening[name]:,.0f} |")
    return "\n".join(rows)


def started(samples: Mapping[str, Any]) -> str:
    """Returns the command lines that started the unchanged recipe, with its variables, and Horovod's own loop."""
    lines = [samples["started"].get(DEFAULT, "")]
    variables = samples["variables"].get(DEFAULT, {})
    lines += [f"# in the ranks: {' '.join(f'{name}={value}' for name, value in variables.items())}"]
    lines += [samples["started"][name] for name in (PEER, YIELDING_PEER) if name in samples["started"]]
    return "\n".join(["```", *lines, "```"])


# ---------------------------------------------------------------------- the suite

SEED = 20
# Of which each has a core of its own for Slurm, on each node, also while it is stopped between its turns.
MOST_RUNS = 20
_BEGAN_S = time.monotonic()


def _cell(cell: Cell) -> Part:
    def measure_it(bench: Bench) -> Iterator[Record]:
        if time.monotonic() - _BEGAN_S > 60 * bench.options.minutes:
            raise NotHere("--minutes are over; earlier results of it are kept")
        directory = bench.once("step", lambda: bench.enter(working_directory()))
        place = OneNode()
        if cell.on_cluster:
            place = OnCluster(bench.cluster(cores_per_node=MOST_RUNS, shared=[directory]))
        try:
            every = measure(
                cell, place=place, directory=directory, scale=bench.scale, seed=SEED, say=bench.say
            )
        except Exception as error:  # the record replaces older ones
            yield failed_record(cell, plain(repr(error)))
            raise NotHere(f"failed: {error!r}") from error
        for found in every:
            yield from records_of(cell, found)
        if names := {name for found in every for name in found.failed}:
            raise NotHere(f"variants that ended with an error: {', '.join(sorted(names))}")

    return Part(figures=(cell.name,), title="the whole cell", measure=measure_it)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=45.0, help="time after which no further cell begins")


SUITE = Suite(
    name="step", about=__doc__, parts=tuple(map(_cell, CELLS.values())), full=FULL, quick=QUICK, tables=tables,
    options=_options,
)  # fmt: skip
