"""Reads the figures of a document, round by round, in the form in which they are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError

READABLE = ("hpctrain.bench.scaling/1", "hpctrain.bench.step/1")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRounds:
    """figures: name -> samples/s of each round, higher is better. spans: of each round when it began and ended,
    seconds since 1970; empty if the document does not say. facts: what must be the same for the figures to be
    comparable, by name. commit: of the code that was measured."""

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
    """Whether the two were measured in turns: as many rounds of both, each old one next to its new one in time.

    Round r of both must lie between the rounds r - 1 and r + 1 of both.
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
    """The n-th run of a size belongs to round n."""
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
