"""`hpctrain bench compare`: checks whether the figures of a second measurement are lower than those of a first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hpctrain.bench.figures import empty_table
from hpctrain.errors import UsageError
from hpctrain.scaling import Comparison, FigureComparison, compare_rounds

# Reads the figures of a document, round by round, in the form in which they are compared.


READABLE = ("hpctrain.bench.scaling/1", "hpctrain.bench.step/1")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRounds:
    """The rounds of a measurement.

    Attributes:
        figures: For each size, by its name, the samples/s of every round; higher is better.
        spans: Start and end of each round in seconds since 1970; empty if the document does not have them.
        facts: Machine, settings and recipe, by name. Two measurements are comparable only if their facts are equal.
        commit: The commit that was measured.
    """

    figures: dict[str, list[float]]
    spans: tuple[tuple[float, float], ...]
    facts: dict[str, Any]
    commit: str | None


def read_rounds(path: Path) -> MeasuredRounds:
    """Reads the rounds in which every size was measured. Raises UsageError if the document cannot be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        schema = document["schema"]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a document of `hpctrain bench`: {error}") from error
    if schema not in READABLE:
        raise UsageError(f"{path} is of schema {schema}; `bench compare` reads {' and '.join(READABLE)}")
    try:
        return _of_scaling(document) if schema == READABLE[0] else _of_steps(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__} {error}") from error


def alternate(old: MeasuredRounds, new: MeasuredRounds) -> bool:
    """Returns True if the two measurements alternated in time, so that their rounds form pairs.

    They must have equally many rounds. Round r of both must begin after round r - 1 of both has ended, and end before
    round r + 1 of either begins.
    """
    if not old.spans or len(old.spans) != len(new.spans):
        return False
    pairs = list(zip(old.spans, new.spans, strict=True))
    ends = [max(first[1], second[1]) for first, second in pairs]
    begins = [min(first[0], second[0]) for first, second in pairs]
    return all(end <= begin for end, begin in zip(ends[:-1], begins[1:], strict=True))


def _of_scaling(document: Mapping[str, Any]) -> MeasuredRounds:
    mode = document["settings"]["mode"]
    by_round: dict[int, dict[str, float]] = {}
    times: dict[int, list[float]] = {}
    for run in document["runs"]:
        name = _name(mode, run["ranks"], run["global_batch"])
        by_round.setdefault(run["round"], {})[name] = run["samples_per_s"]
        times.setdefault(run["round"], []).extend([run["started"], run["ended"]])
    sizes = len(document["settings"]["ranks"])
    whole = [number for number in sorted(by_round) if len(by_round[number]) == sizes]
    names = list(by_round[whole[0]]) if whole else []
    return MeasuredRounds(
        figures={name: [by_round[number][name] for number in whole] for name in sorted(names, key=_order)},
        spans=tuple((min(times[number]), max(times[number])) for number in whole),
        facts=_facts(document),
        commit=document["commit"],
    )


def _of_steps(document: Mapping[str, Any]) -> MeasuredRounds:
    """Returns the rounds of a step measurement, where the n-th run of a size belongs to round n."""
    found: dict[str, list[float]] = {}
    for run in document["runs"]:
        name = _name("", run["num_ranks"], run["global_batch"])
        found.setdefault(name, []).append(run["samples_per_s"])
    rounds = min((len(rates) for rates in found.values()), default=0)
    return MeasuredRounds(
        figures={name: found[name][:rounds] for name in sorted(found, key=_order)},
        spans=(),
        facts=_facts(document),
        commit=document["commit"],
    )


def _name(mode: str, ranks: int, batch: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}, batch {batch}" + (f", {mode}" if mode else "")


def _order(name: str) -> tuple[int, str]:
    return int(name.split()[0]), name


def _facts(document: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"the machine's {name}": document["machine"][name] for name in ("host", "cpu", "cores")}
    facts |= {f"settings.{name}": document["settings"][name] for name in ("steps", "warmup_steps")}
    facts |= {f"recipe section [{name}]": section for name, section in document["recipe"].items()}
    return facts


# Implementation of `hpctrain bench compare`: from two documents to a table, lines and JSON.


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedDocuments:
    """The comparison of two documents.

    old, new: paths of the documents.
    rounds: the number of rounds of the old and of the new document.
    notes: texts that a reader needs to judge the figures.
    """

    old: str
    new: str
    rounds: tuple[int, int]
    comparison: Comparison
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "hpctrain.bench.compare/1",
            "old": self.old,
            "new": self.new,
            "rounds": list(self.rounds),
            "fell": [figure.name for figure in self.comparison.fell],
            **self.comparison.as_json(),
            "notes": list(self.notes),
        }


def compare_documents(
    old: Path, new: Path, *, threshold: float = 0.0, alpha: float = 0.05, seed: int = 0
) -> ComparedDocuments:
    """Compares the figures (samples/s) that both documents have.

    threshold: the relative decrease that is tolerated.
    alpha: the probability of a false alarm among all figures.
    seed: the seed for drawing arrangements of the rounds at random; see `compare_rounds`.

    Raises UsageError if the documents have no size in common, or if one of them has fewer than two whole rounds.
    """
    first, second = read_rounds(old), read_rounds(new)
    names = [name for name in first.figures if name in second.figures]
    if not names:
        raise UsageError(
            f"{old} and {new} have no size in common: the first has {'; '.join(first.figures) or 'none'}, the second "
            f"{'; '.join(second.figures) or 'none'}. Measure the same sizes"
        )
    rounds = (len(first.figures[names[0]]), len(second.figures[names[0]]))
    if min(rounds) < 2:
        raise UsageError(
            f"{old} has {rounds[0]} whole rounds and {new} has {rounds[1]}: each needs at least two"
        )
    paired = alternate(first, second)
    comparison = compare_rounds(
        {name: first.figures[name] for name in names}, {name: second.figures[name] for name in names},
        paired=paired, threshold=threshold, alpha=alpha, seed=seed,
    )  # fmt: skip
    notes = _notes(first, second, comparison=comparison, rounds=rounds)
    return ComparedDocuments(
        old=str(old), new=str(new), rounds=rounds, comparison=comparison, notes=tuple(notes)
    )


def comparison_table(found: ComparedDocuments) -> Table:
    """Returns a table for the terminal with one row per compared figure."""
    columns = ("figure", "new / old", "95% interval", "p fell", "p rose", "noise", "would find", "verdict")
    table = empty_table(f"{found.new} / {found.old}", columns, texts=("figure",))
    for figure in found.comparison.figures:
        low, high = figure.ratio.low, figure.ratio.high
        table.add_row(
            figure.name,
            f"{figure.ratio.value:.3f}",
            "" if low is None or high is None else f"{low:.3f}-{high:.3f}",
            f"{figure.p_fell:.3g}",
            f"{figure.p_rose:.3g}",
            f"{figure.noise:.1%}",
            f"-{figure.detectable:.1%}",
            _verdict(figure),
        )
    return table


def comparison_lines(found: ComparedDocuments) -> list[str]:
    """Returns the lines below the table: how the figures were compared, reasons for doubt, and the verdict."""
    comparison = found.comparison
    arrangements = f"{'all' if comparison.exact else 'a sample of'} {comparison.arrangements:,} arrangements"
    order = "measured in turns" if comparison.paired else "not measured in turns"
    how = f"{found.rounds[1]} and {found.rounds[0]} rounds, {order}; permutation test over {arrangements}, p adjusted"
    fell = [f"{figure.name} by {1 - figure.ratio.value:.1%}" for figure in comparison.fell]
    verdict = f"fell by more than noise: {'; '.join(fell)}" if fell else "nothing fell by more than its noise"
    return [f"{how} for all figures", *found.notes, verdict]


def _verdict(figure: FigureComparison) -> str:
    return "fell" if figure.fell else "rose" if figure.rose else ""


def _notes(
    old: MeasuredRounds, new: MeasuredRounds, *, comparison: Comparison, rounds: tuple[int, int]
) -> list[str]:
    notes = []
    left_out = sorted(old.figures.keys() ^ new.figures.keys())
    if left_out:
        notes.append(f"only one of the two has: {'; '.join(left_out)}")
    differs = [name for name in old.facts if old.facts[name] != new.facts.get(name)]
    if differs:
        notes.append(f"they differ in more than the code: {', '.join(differs)}")
    if old.commit is not None and old.commit == new.commit and not old.commit.endswith("+changes"):
        notes.append(f"both measured commit {old.commit}")
    if not comparison.paired:
        notes.append(
            "the rounds of the two were not measured in turns: a change of the machine in between looks like a change "
            "of the code; measure in turns with `hpctrain bench scaling --at-most 1 --resume`"
        )
    if comparison.least_p > comparison.alpha:
        notes.append(
            f"{rounds[0]} and {rounds[1]} rounds cannot show any decrease: the smallest possible p is "
            f"{comparison.least_p:.2g}; measure at least 5 rounds of each"
        )
    coarse = [figure for figure in comparison.figures if figure.detectable > 0.1 and not figure.fell]
    if coarse:
        notes.append(
            f"a decrease of 10% could stay unseen ({', '.join(f.name for f in coarse)}): with this noise more rounds "
            "are needed (column `would find`)"
        )
    return notes
