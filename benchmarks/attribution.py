"""What dividing each step into its parts, recording it and adding up the ranks' time costs a step of 50 ms.

    hpctrain launch -n 2 -- python -m benchmarks.attribution

Times the calls that a training step makes for its telemetry, on every rank, without the training around them: with the
record and without, so that the added part and the whole cost are known; the two all-reduces of a window apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain import init
from hpctrain.comm import World, broadcast_json
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train import EfficiencyWatch

STEP_S = 0.05
WINDOW_S = 10.0
ROUNDS, STEPS, WINDOWS = 30, 200, 30
MOST_SHARE = 0.005


def divide(clock: StepClock) -> dict[str, float]:
    """Makes the calls of the step clock that telemetry adds to a step in `hpctrain.train`."""
    clock.add("input", seconds=1e-3)
    with clock.span("compute", what="forward and backward"):
        pass
    now = time.perf_counter()
    clock.add("sync", seconds=1e-3)
    clock.add("hidden_sync", seconds=1e-3)
    clock.add("exposed_sync", seconds=1e-3, ended=now, what="wait for reduction")
    clock.add("compute", seconds=1e-3, ended=now, what="last gradients")
    clock.add("compute", seconds=1e-3, ended=now, what="optimizer")
    clock.sync_ended(now)
    return clock.lap()


def record_of(step: int, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "kind": "step", "time": time.time(), "step": step, "epoch": 3, "samples": 8, "skipped_samples": 0,
        "global_samples": 16 * step, "loss": 0.123456789, "lr": 1e-3, "grad_norm": 1.23456789, "loss_scale": 1.0,
        "applied": True, "seconds": seconds,
    }  # fmt: skip


def seconds_per_step(do: Callable[[int], object]) -> float:
    """Returns the median over rounds of the mean time of `do` in a round."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for step in range(STEPS):
            do(step)
        found.append((time.perf_counter() - began) / STEPS)
    return statistics.median(found)


def measure(world: World, folder: Path) -> dict[str, float]:
    """Returns medians by what was timed, on this rank. Collective."""
    clock = StepClock()
    records = RecordWriter(folder / f"{world.rank}.jsonl", every_s=1.0)
    watch = EfficiencyWatch(world, records=records, clock=clock)

    def add(step: int) -> None:
        watch.after_step(step, divide(clock), samples=16, window_ends=False)

    def add_and_record(step: int) -> None:
        seconds = divide(clock)
        records.write(record_of(step, seconds))
        watch.after_step(step, seconds, samples=16, window_ends=False)

    found = {"divide": seconds_per_step(lambda step: divide(clock)), "divide, add": seconds_per_step(add)}
    watch.ends(0)
    found["divide, add, record"] = seconds_per_step(add_and_record)
    windows = []
    for _ in range(WINDOWS):
        for step in range(int(WINDOW_S / STEP_S) - 1):
            add(step)
        world.barrier()
        began = time.perf_counter()
        watch.after_step(0, divide(clock), samples=16, window_ends=True)
        windows.append(time.perf_counter() - began)
    found["window"] = statistics.median(windows)
    records.close()
    return found


def report(found: dict[str, float], *, num_ranks: int) -> str:
    window = found["window"] / (WINDOW_S / STEP_S)
    total = found["divide, add, record"] + window
    lines = [
        f"{name}: {seconds * 1e6:.1f} us per step" for name, seconds in found.items() if name != "window"
    ]
    return "\n".join([
        f"{num_ranks} ranks, rank 0",
        *lines,
        f"end of a window, every {WINDOW_S:.0f} s: {found['window'] * 1e6:.0f} us, {window * 1e6:.2f} us per step",
        f"together {total * 1e6:.1f} us, {total / STEP_S:.3%} of {STEP_S * 1e3:.0f} ms; under {MOST_SHARE:.1%}: "
        + ("yes" if total / STEP_S < MOST_SHARE else "no"),
    ])  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.attribution", description=__doc__).parse_args()
    with init() as session, tempfile.TemporaryDirectory() as own:
        folder = Path(broadcast_json(session.world, own))
        found = measure(session.world, folder)
        if session.rank == 0:
            print(report(found, num_ranks=session.world_size))
        session.world.barrier()


if __name__ == "__main__":
    main()
