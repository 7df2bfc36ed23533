"""`python -m benchmarks.start`: starting ranks, without and with a fork server (`hpctrain launch --fork-server`)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.command import finish, leave_on_sigterm, open_console, parser_of, saying
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.start import memory, page, paths, runs
from benchmarks.start.figures import epoch_records, memory_records, path_records, processor_records
from benchmarks.start.kinds import NOTHING, WITHOUT
from benchmarks.starting import REPOSITORY

SEED = 37
FIGURES = {"1": ("1", "5"), "2": ("2",), "3": ("3",), "4": ("4",)}  # what is measured together


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """epoch_rounds: by number of ranks. cpu_sizes, path_sizes: numbers of ranks."""

    epoch_rounds: dict[int, int]
    cpu_sizes: Sequence[int]
    cpu_rounds: int
    path_sizes: Sequence[int]
    memory_ranks: int
    memory_rounds: int
    memory_steps: int


FULL = Scale(
    epoch_rounds={1: 7, 2: 7, 4: 5, 8: 5, 16: 5, 48: 3},
    cpu_sizes=(2, 4, 8, 16), cpu_rounds=5, path_sizes=(1, 2, 4, 8), memory_ranks=8, memory_rounds=3, memory_steps=50,
)  # fmt: skip
QUICK = Scale(
    epoch_rounds={2: 1}, cpu_sizes=(1, 2), cpu_rounds=1, path_sizes=(1, 2), memory_ranks=2, memory_rounds=1,
    memory_steps=5,
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("start", description=__doc__, figures="1,2,3,4,5")
    arguments = parser.parse_args(words)
    wanted = set(arguments.only.split(","))
    if unknown := sorted(wanted - {"1", "2", "3", "4", "5"}):
        parser.error(f"--only {unknown[0]}: there are 1 to 5 (5 is measured together with 1)")
    leave_on_sigterm()
    console = open_console()
    say = saying(console)
    load = [_load()]
    about = about_this_run(REPOSITORY, benchmark="start") | {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "seed": SEED,
    }  # fmt: skip
    scale = QUICK if arguments.quick else FULL
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    started: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-start-") as directory:
        place = runs.Workplace(Path(directory))
        parts: dict[str, Callable[[], list[Record]]] = {
            "1": lambda: _epochs(place, scale, say=say),
            "2": lambda: _processor_seconds(place, scale, started=started),
            "3": lambda: _paths(place, scale),
            "4": lambda: _memory(place, scale),
        }
        for number, measure in parts.items():
            figures = FIGURES[number]
            if not wanted & {*figures}:
                continue
            try:
                made += measure()
            except runs.RunFailed as error:
                say(f"figure {number} failed: {error}")
                failed |= {f"start.{figure}": [str(error).splitlines()[0]] for figure in figures}
                continue
            say(f"figure{'s' if len(figures) > 1 else ''} {' and '.join(figures)} measured")
    about["load"] = [*load, _load()]
    run = Run(records=made, failed=failed, started=started)
    return finish(console, run, benchmark="start", about=about, output=arguments.output, refresh=page.refresh)


def _epochs(place: runs.Workplace, scale: Scale, *, say: Callable[[str], None]) -> list[Record]:
    found = []
    for num_ranks, rounds in scale.epoch_rounds.items():
        found.append(runs.epochs(place, num_ranks=num_ranks, rounds=rounds, seed=SEED))
        say(f"epochs with {num_ranks} ranks measured")
    return epoch_records(found)


def _processor_seconds(
    place: runs.Workplace, scale: Scale, *, started: dict[str, dict[str, Any]]
) -> list[Record]:
    started["start.2"] = {"2 ranks": [start.as_json() for start in runs.starts(place)]}
    found = runs.processor_seconds(place, sizes=scale.cpu_sizes, rounds=scale.cpu_rounds, seed=SEED)
    return processor_records(found)


def _paths(place: runs.Workplace, scale: Scale) -> list[Record]:
    if (reason := paths.why_not()) is not None:
        raise runs.RunFailed(reason)
    return path_records(
        {
            kind: {
                num_ranks: paths.measure(place, num_ranks=num_ranks, forked=kind == NOTHING)
                for num_ranks in scale.path_sizes
            }
            for kind in (WITHOUT, NOTHING)
        }
    )


def _memory(place: runs.Workplace, scale: Scale) -> list[Record]:
    num_ranks, steps = scale.memory_ranks, scale.memory_steps
    found: dict[str, list[memory.Memory]] = {WITHOUT: [], NOTHING: []}
    for _ in range(scale.memory_rounds):
        for kind, rounds in found.items():
            rounds.append(memory.measure(place, kind=kind, num_ranks=num_ranks, steps=steps))
    return memory_records(found, num_ranks=num_ranks, steps=steps)


def _load() -> float:
    return round(os.getloadavg()[0], 2)


if __name__ == "__main__":
    sys.exit(main())
