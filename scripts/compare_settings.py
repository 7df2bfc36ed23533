"""Compares settings of one recipe by their speed: trains with each in turns, and prints the medians of the rounds.

    python scripts/compare_settings.py examples/digits.toml --ranks 2 -- "" run.compile=true run.precision=bf16

A setting is a text of `SECTION.KEY=VALUE`, separated by commas; "" is the recipe itself. What it prints for a setting:
samples per second of the median step without the first steps (in which compiled code is made), the median over the
rounds, and the ratio to the first setting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_SKIPPED_STEPS = 5


def rate_of_run(recipe: Path, *, ranks: int, settings: list[str], directory: Path) -> float:
    """Trains on `ranks` ranks and returns the samples per second of the median step."""
    sets = [part for text in [f"run.directory={directory}", *settings] for part in ("--set", text)]
    launch = [
        "hpctrain",
        "launch",
        "-n",
        str(ranks),
        "--",
        "hpctrain",
        "train",
        str(recipe),
        "--resume",
        "never",
    ]
    done = subprocess.run([*launch, *sets], capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(settings)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    lines = (directory / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"][_SKIPPED_STEPS:]
    most = max(step["samples"] for step in steps)  # without the last batch of an epoch
    seconds: list[float] = [step["seconds"]["step"] for step in steps if step["samples"] == most]
    return float(most * ranks / statistics.median(seconds))


def compare() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="for all settings")
    parser.add_argument("settings", nargs="+")
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {text: [] for text in asked.settings}
    with tempfile.TemporaryDirectory() as name:
        for number in range(asked.rounds):
            for text in rates:
                settings = [*asked.set, *filter(None, text.split(","))]
                directory = Path(name) / f"{number}-{len(rates)}-{list(rates).index(text)}"
                rates[text].append(
                    rate_of_run(asked.recipe, ranks=asked.ranks, settings=settings, directory=directory)
                )
    medians = {text: statistics.median(found) for text, found in rates.items()}
    first = medians[asked.settings[0]]
    for text, found in rates.items():
        print(
            f"{text or 'the recipe'}: {medians[text]:.0f} samples/s, {medians[text] / first:.2f} times the first; "
            f"rounds {' '.join(f'{rate:.0f}' for rate in found)}"
        )


if __name__ == "__main__":
    compare()
