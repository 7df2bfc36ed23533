"""How much of the time that one slow rank costs stale reads win back, and what they cost if no rank is slow.

`python -m benchmarks.asynchronous.stale_reads` prints the figures. A step's computation is a wait, so that more ranks
than cores can be measured; reading, writing and the optimizer are real.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from benchmarks.asynchronous.stale_ranks import SLOW_EVERY, SLOW_RANK, seconds_per_step
from tests.ranks_launcher import run_ranks


def measure(*, num_ranks: int, staleness: Any, num_steps: int, step_s: float, rounds: int) -> dict[str, Any]:
    """Returns medians over rounds in turns: of a synchronous step, and of one with stale reads, without and with the
    slow rank; the share of the lost time that was won back; and the most that sharing the work can win back."""
    cells: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name, bound in (("synchronous", None), ("stale", staleness)):
            for slow in (False, True):
                outputs = run_ranks(
                    num_ranks, seconds_per_step, bound, slow, num_steps, step_s, timeout_s=600
                ).outputs
                found = {
                    "seconds": max(of_rank["seconds"] for of_rank in outputs),
                    "largest": max(of_rank["largest"] for of_rank in outputs),
                    "share": outputs[SLOW_RANK]["share"],
                }
                cells.setdefault(f"{name}{', one rank slow' if slow else ''}", []).append(found)
    medians = {
        name: {key: statistics.median(one[key] for one in of_cell) for key in of_cell[0]}
        for name, of_cell in cells.items()
    }
    lost_s = medians["synchronous, one rank slow"]["seconds"] - medians["synchronous"]["seconds"]
    won_s = medians["synchronous, one rank slow"]["seconds"] - medians["stale, one rank slow"]["seconds"]
    # The slow rank works at 1 / 1.1 of its speed, which the others cannot replace without more time.
    best = 1 - (num_ranks / (num_ranks - 1 + 1 / (1 + 1 / SLOW_EVERY)) - 1) * SLOW_EVERY
    return {
        "ranks": num_ranks, "staleness": staleness, "step_s": step_s, "steps": num_steps, "rounds": rounds,
        "cells": medians, "won_back": won_s / lost_s, "at_most": best,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--staleness", default="3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    staleness = asked.staleness if asked.staleness == "any" else int(asked.staleness)
    found = measure(
        num_ranks=asked.ranks,
        staleness=staleness,
        num_steps=asked.steps,
        step_s=asked.step_s,
        rounds=asked.rounds,
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
