"""`python -m benchmarks.quick`: measures the headline figures of all suites with few rounds, in ten minutes.

Each part runs in turn with its peers, and ends when its time is over; a part that fails leaves the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.harness import Bench, finish, leave_on_sigterm, open_console, parse, saying
from benchmarks.headlines import QUICK, values_of
from benchmarks.quick.parts import PARTS, Part, kept
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY
from tests.cluster import why_not

MINUTES = 10.0
KEPT_RUNS = 20  # in the history


class OutOfTime(BaseException):
    """The part's time is over. No Exception, so that no handler of failed runs takes it for one."""


@dataclass(kw_only=True)
class Outcome:
    """What a run of the parts gave. parts: name -> `seconds` and `outcome` in words."""

    records: list[Record] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(
        words, benchmark=QUICK, description=__doc__, names=[part.name for part in PARTS], options=_minutes,
        output=f"`make bench` passes benchmarks/results/{QUICK}.json; only then docs/results.md is written",
    )  # fmt: skip
    console = open_console()
    about = about_this_run(REPOSITORY, benchmark="*.py")
    about["load"] = round(os.getloadavg()[0], 2)
    about["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = [part for part in PARTS if part.name in options.only]
    with Bench(say=saying(console), about=about) as bench:
        outcome = measure(console, parts, bench=bench, scale=options.minutes / MINUTES)
    about["parts"] = outcome.parts
    about["history"] = history(options.output, about=about, records=outcome.records)
    run = Run(records=outcome.records, failed=outcome.failed, started=bench.started)
    return finish(console, run, benchmark=QUICK, about=about, output=options.output, refresh=None)


def _minutes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="N",
        help="time for all parts; each has a fixed share of it, and fails when that is over [default: %(default)g]",
    )  # fmt: skip


def measure(console: Console, parts: Sequence[Part], *, bench: Bench, scale: float) -> Outcome:
    """Runs the parts one after another. scale: factor of their budgets."""
    outcome = Outcome()
    began_s = time.monotonic()
    for number, part in enumerate(parts, 1):
        reason = why_not() if part.on_cluster else None
        if reason is not None:
            bench.say(f"{part.name} is not measured, no cluster: {reason}")
            outcome.parts[part.name] = {"seconds": 0.0, "outcome": f"not measured, no cluster: {reason}"}
            continue
        if not part.on_cluster:
            bench.cluster_down()
        budget_s, left_s = scale * part.budget_s, scale * sum(other.budget_s for other in parts[number - 1 :])
        bench.say(
            f"part {number} of {len(parts)}: {part.title}; at most {budget_s:.0f} s, all that is left {left_s:.0f} s"
        )
        part_began_s = time.monotonic()
        found: list[Record] = []
        error = None
        try:
            with _shown(console, f"{part.name}, of at most {budget_s:.0f} s"), at_most(budget_s):
                found.extend(part.measure(bench))
        except OutOfTime:
            error = f"not done within {budget_s:g} s"
        except Exception as raised:  # the other parts are still measured
            bench.say(f"{part.name}: {raised!r}")
            error = _first_line(raised)
        records, failed = kept(part, found, error=error)
        outcome.records += records
        outcome.failed |= failed
        words = "; ".join(dict.fromkeys(reason for reasons in failed.values() for reason in reasons))
        outcome.parts[part.name] = {
            "seconds": round(time.monotonic() - part_began_s, 1),
            "outcome": f"failed: {words}" if failed else "measured",
        }
        bench.say(f"{part.name}: {outcome.parts[part.name]['outcome']}")
    bench.say(f"all parts: {time.monotonic() - began_s:.0f} s")
    return outcome


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block after this time. In the main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _shown(console: Console, what: str) -> Iterator[None]:
    """Shows on a terminal what runs, and for how long it has."""
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def history(output: Path | None, *, about: dict[str, Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the runs before this one that the file has, and this one: date, commit, machine, and the numbers shown of
    the headline figures."""
    before = json.loads(output.read_text())["history"] if output is not None and output.exists() else []
    machine = about["machine"]
    this = {
        "date": about["date"], "commit": about["commit"], "processor": machine["processor"],
        "cores": machine["cores"], "values": values_of(records),
    }  # fmt: skip
    return [*before, this][-KEPT_RUNS:]


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
