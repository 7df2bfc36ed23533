"""What the agreement on a stop, the comparison of the ranks and the guards add to a step of 50 ms."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.harness import Bench, Part, Suite
from benchmarks.results_file import Record
from benchmarks.results_page import markdown

# Of the project's goals: all parts together add less than this to a step of 50 ms.
MOST_PERCENT = 0.5
STEP_S = 0.05
WINDOW_S = 10.0  # after so long a run compares its ranks
WITHOUT, ALL = "none", "all"
# Kind of step -> letter of its records, what it is.
KINDS = {
    "stop": ("a", "the agreement on a stop"),
    "stragglers": ("b", "the comparison of the ranks"),
    "guards": ("c", "the guards"),
    ALL: ("d", "all three"),
}
# Each 50 ms step with one of these bears its share of what comes once in ten seconds of steps.
WINDOWS_OF = {"stragglers": ("stragglers",), "guards": ("guards",), ALL: ("stragglers", "guards")}
_RESAMPLES = 2000
_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Seconds that a part adds to a step: median of the rounds' differences, and its interval of 95%."""

    median_s: float
    low_s: float
    high_s: float


def added(with_it: Sequence[Sequence[float]], without: Sequence[Sequence[float]]) -> Added:
    """Returns what the blocks of steps `with_it` take longer than those `without`, of the same rounds.

    The interval is by resampling the rounds (percentile bootstrap: Efron and Tibshirani 1993, chapter 13).
    """
    pairs = [median(a) - median(b) for a, b in zip(with_it, without, strict=True)]
    draw = random.Random(_SEED)
    medians = sorted(median(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    edge = _RESAMPLES // 40
    return Added(median_s=median(pairs), low_s=medians[edge], high_s=medians[-edge - 1])


def per_step_s(windows: Mapping[str, Sequence[float]], kind: str) -> float:
    """Returns a step's share of what a kind of step does once in ten seconds: the mean, so that slow ones count."""
    return sum(fmean(windows[name]) for name in WINDOWS_OF.get(kind, ())) * STEP_S / WINDOW_S


def step_records(found: Mapping[str, Any]) -> list[Record]:
    """Returns the records of figures 1 and 2. found: see `ranks.steps`."""
    steps, windows = found["steps"], found["windows"]
    records = []
    for kind, (letter, what) in KINDS.items():
        difference = added(steps[kind]["step"], steps[WITHOUT]["step"])
        share_s = per_step_s(windows, kind)
        samples: dict[str, Any] = {
            "step_s": steps[kind]["step"], "median_s": difference.median_s, "low_s": difference.low_s,
            "high_s": difference.high_s, "windows_s": share_s,
        }  # fmt: skip
        if kind == ALL:
            samples |= {"without_s": steps[WITHOUT]["step"], "windows": windows}
        records.append(
            _record(f"1{letter}", f"{what}: added to a step of 50 ms, upper end of the interval",
                    seconds=difference.high_s + share_s, samples=samples)
        )  # fmt: skip
    for kind, (letter, what) in KINDS.items():
        own = {
            name: fmean(_flat(steps[kind][name])) - fmean(_flat(steps[WITHOUT][name]))
            for name in ("wall", "cpu")
        }
        share_s = per_step_s(windows, kind)
        records.append(
            _record(f"2{letter}", f"{what}: time in its own calls, mean of the steps",
                    seconds=own["wall"] + share_s,
                    samples={"wall_s": own["wall"], "cpu_s": own["cpu"], "windows_s": share_s})
        )  # fmt: skip
    return records


def judging_records(found: Mapping[str, Sequence[float]]) -> list[Record]:
    """Returns the records of figure 3. found: see `ranks.judging`."""
    return [
        _record(f"3.{num_ranks}", f"judging {int(num_ranks):,} ranks on rank 0, every ten seconds",
                seconds=fmean(seconds) * STEP_S / WINDOW_S, samples={"seconds": list(seconds)})
        for num_ranks, seconds in found.items()
    ]  # fmt: skip


def _record(name: str, what: str, *, seconds: float, samples: Any) -> Record:
    return Record(
        id=f"overhead.{name}", what=what, value=100 * seconds / STEP_S, bar=MOST_PERCENT, sense="at most",
        unit="% of a step of 50 ms", samples=samples,
    )  # fmt: skip


def _flat(blocks: Sequence[Sequence[float]]) -> list[float]:
    return [value for block in blocks for value in block]


# ---------------------------------------------------------------------- the page


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    samples = {record["id"]: record["samples"] for record in content["records"]}
    if "overhead.1d" not in samples:
        return {}
    return {"added": _table_added(samples), "windows": _table_of_windows(samples["overhead.1d"]["windows"])}


def _table_added(samples: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of microseconds by part."""
    rows = []
    for letter, what in KINDS.values():
        paired, own = samples[f"overhead.1{letter}"], samples[f"overhead.2{letter}"]
        interval = f"{_us(paired['low_s'])} to {_us(paired['high_s'])}"
        rows.append(
            [
                what,
                _us(paired["median_s"]),
                interval,
                _us(own["wall_s"]),
                _us(own["cpu_s"]),
                _us(paired["windows_s"]),
            ]
        )
    without = median(map(median, samples["overhead.1d"]["without_s"]))
    rows.append(["for comparison: the model's step without them", _us(without), "", "", "", ""])
    return markdown(
        ("", "added to a step, µs", "95% interval", "in its own calls, µs", "of the processor, µs",
         "what comes every ten seconds, a step's share, µs"),
        rows,
    )  # fmt: skip


def _table_of_windows(seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns the table of what comes once in a window of steps."""
    names = {
        "stragglers": "all-gather of the times, and rank 0 judges 2 ranks",
        "guards": "all-gather of the samples at the end of an epoch",
    }
    return markdown(
        ("", "ms, mean", "least", "most"),
        (
            [
                what,
                *(
                    f"{1e3 * value:.3f}"
                    for value in (fmean(seconds[name]), min(seconds[name]), max(seconds[name]))
                ),
            ]
            for name, what in names.items()
        ),
    )


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


# ---------------------------------------------------------------------- the suite

_RANKS = "benchmarks.overhead.ranks"
_TIMEOUT_S = 280.0
# Five kinds of steps of 50 ms: 1.3 s per round.
STEPS = {"rounds": 80, "block": 5, "windows": 200, "seed": _SEED}
JUDGING = {"ranks": [4, 1000, 10_000], "repeats": 20, "seed": _SEED}


def _steps(bench: Bench) -> list[Record]:
    return step_records(bench.one_node(_RANKS).run("steps", bench.scale, timeout_s=_TIMEOUT_S))


def _judging(bench: Bench) -> list[Record]:
    return judging_records(bench.one_node(_RANKS).run("judging", JUDGING, timeout_s=_TIMEOUT_S))


SUITE = Suite(
    name="overhead", about=__doc__,
    parts=(
        Part(figures=("1", "2"), title="all", measure=_steps),
        Part(figures=("3",), title="all", measure=_judging),
    ),
    full=STEPS, quick={**STEPS, "rounds": 2, "windows": 5}, tables=tables,
)  # fmt: skip
