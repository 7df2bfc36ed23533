"""Tables that are specific to docs/benchmarks/start.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page
from benchmarks.start.figures import digits, ratios, spread
from benchmarks.start.kinds import NAMES, NOTHING, UP, WITHOUT
from benchmarks.start.memory import CLIENTS, RANKS, SERVER
from benchmarks.start.ranks import INIT, LEFT


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, when and on what they were measured, into the page."""
    results_page.refresh(page, content, more={"measured": measured(content), **tables(content["records"])})


def measured(content: Mapping[str, Any]) -> str:
    """Returns when the last run was, with which seed, and how busy the machine was before and after it."""
    before, after = content["load"]
    busy = ""
    if before > content["machine"]["cores"] / 2:
        busy = " **The machine was busy with other work: times are not those of a quiet one.**"
    return (
        f"{content['date']}; seed {content['seed']}; load of the machine (one minute) before the run {before:g}, after "
        f"it {after:g}.{busy}"
    )


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name of the table -> its lines."""
    samples = {record["id"]: record["samples"] for record in records}
    made = {"epochs": epochs(samples)} if "start.5" in samples else {}
    for name, render in (("2", processor), ("3", paths), ("4", memory)):
        if f"start.{name}" in samples:
            made[render.__name__] = render(samples[f"start.{name}"])
    return made


def epochs(samples: Mapping[str, Any]) -> str:
    """Returns the table of seconds by number of ranks. samples: of each record."""
    rows = [
        f"| ranks | rounds | {NAMES[WITHOUT]}, s | {NAMES[NOTHING]}, s | times as fast | {NAMES[UP]}, s "
        "| times as fast | runs that differ | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for num_ranks, results in samples["start.5"].items():
        seconds = {kind: samples[f"start.1.{kind}.{num_ranks}"] for kind in (NOTHING, UP)}
        without = seconds[NOTHING]["without_s"]
        cells = [num_ranks, str(len(without)), _spread(without)]
        for kind in (NOTHING, UP):
            forked = seconds[kind]["forked_s"]
            cells += [_spread(forked), _spread(ratios(without, forked))]
        cells += [f"{len(results['differing'])} of {results['runs']}", results["loss"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def processor(samples: Mapping[str, Any]) -> str:
    """Returns the table of processor seconds by number of ranks."""
    rows = [
        "| ranks | until MPI has started, without, s | with a fork server, s | without / with "
        "| until Python has ended, without, s | with a fork server, s | without / with |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (*samples["cpu_s"][INIT][WITHOUT], "each further rank"):
        cells = [name]
        for end in (INIT, LEFT):
            without, forked = (
                samples["further_s"][end][kind]
                if name == "each further rank"
                else samples["cpu_s"][end][kind][name]
                for kind in (WITHOUT, NOTHING)
            )
            cells += [_spread(without), _spread(forked), _spread(ratios(without, forked))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def paths(samples: Mapping[str, Any]) -> str:
    """Returns the table of operations by number of ranks."""
    rows = [
        "| ranks | without | with a fork server | of these, of the process that has most | without / with |",
        "| --- | --- | --- | --- | --- |",
    ]
    for num_ranks, without in samples[WITHOUT].items():
        forked = samples[NOTHING][num_ranks]
        rows.append(
            f"| {num_ranks} | {without['count']:,} | {forked['count']:,} | {forked['by_process'][0]:,} "
            f"| {without['count'] / forked['count']:.2f} |"
        )
    return "\n".join(rows)


def memory(samples: Mapping[str, Any]) -> str:
    """Returns the table of megabytes by what the processes are."""
    rows = ["| | without, MB | with a fork server, MB |", "| --- | --- | --- |"]

    def megabytes(kind: str, role: str) -> str:
        found = [one["pss"].get(role, 0) / 1e6 for one in samples[kind]]
        number = samples[kind][0]["numbers"].get(role, 0)
        return f"{median(found):.1f} ({number})" if number else ""

    for role in (RANKS, SERVER, CLIENTS):
        rows.append(f"| {role} | {megabytes(WITHOUT, role)} | {megabytes(NOTHING, role)} |")
    every = {kind: [sum(one["pss"].values()) / 1e6 for one in samples[kind]] for kind in (WITHOUT, NOTHING)}
    rows.append(f"| together | {_spread(every[WITHOUT])} | {_spread(every[NOTHING])} |")
    return "\n".join(rows)


def _spread(values: Sequence[float]) -> str:
    """Returns the median, and the quartiles in brackets."""
    found = spread(values)
    return f"{digits(found.median)} ({digits(found.low)} to {digits(found.high)})"
