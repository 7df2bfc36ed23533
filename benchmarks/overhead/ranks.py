"""The program of each rank: `python -m benchmarks.overhead.ranks CASE SETTINGS.json RESULT.json`."""

from __future__ import annotations

import faulthandler
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.overhead.figures import ALL, STEP_S, WITHOUT
from benchmarks.overhead.parts import GuardsPart, Part, StopPart, StragglersPart
from benchmarks.starting import this_rank
from hpctrain.comm import all_gather_json
from hpctrain.run import Session, init
from hpctrain.stragglers import COLUMNS, SlowRanks
from hpctrain.telemetry import RecordWriter
from hpctrain.topology import Topology

WIDTH = 256
# Before the calls that are timed, a step multiplies matrices, which takes their data out of the caches, and then spins.
_SPIN_S = 0.003
_MATRICES = 32  # 8 MB


class Meter:
    """Seconds of wall clock and of this thread's processor within the parts' calls."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        self._began = (time.perf_counter(), time.thread_time())

    def end(self) -> None:
        self.cpu_s += time.thread_time() - self._began[1]
        self.wall_s += time.perf_counter() - self._began[0]


class Loop:
    """A training loop with steps of `STEP_S`: a small model, and busy time before it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._model = torch.nn.Linear(WIDTH, WIDTH)
        self._updater = session.distributed_optimizer(
            self._model, torch.optim.SGD(self._model.parameters(), lr=1e-3)
        )
        self._inputs = torch.ones(8, WIDTH)
        self._matrices = [torch.eye(WIDTH) for _ in range(_MATRICES)]
        self._number = 0
        self._computed_s = 0.0

    def step(self, parts: Sequence[Part]) -> dict[str, float]:
        """Makes one step. Collective. Returns seconds: `step` from the end of the busy time, and `wall` and `cpu` in
        the calls of the parts."""
        self._number += 1
        meter = Meter()

        def accepts(grad_norm: float, sums: Mapping[str, float]) -> bool:
            meter.begin()
            accepted = all(part.accepts(grad_norm, sums) for part in parts)
            meter.end()
            return accepted

        busy_s = self._be_busy()
        began = time.perf_counter()
        compute = self._compute
        for part in parts:
            compute = _attempted(part, compute)
        loss = compute()
        attempted_s = time.perf_counter() - began - self._computed_s
        meter.begin()
        sums = {"loss": loss}
        for part in parts:
            sums |= part.votes()
        meter.end()
        outcome = self._updater.step(sums=sums, accepts=accepts)
        meter.begin()
        for part in parts:
            part.after(self._number, outcome, step_s=busy_s + time.perf_counter() - began)
        meter.end()
        step_s = time.perf_counter() - began
        return {"step": step_s, "wall": meter.wall_s + attempted_s, "cpu": meter.cpu_s + attempted_s}

    def close(self) -> None:
        self._updater.close()

    def _compute(self) -> float:
        began = time.perf_counter()
        loss = self._model(self._inputs).square().mean()
        self._updater.backward(loss, weight=1 / self._session.world_size)
        value = float(loss.detach()) / self._session.world_size
        self._computed_s = time.perf_counter() - began
        return value

    def _be_busy(self) -> float:
        self._session.world.barrier()
        began = time.perf_counter()
        end = began + STEP_S
        number = 0
        while time.perf_counter() < end - _SPIN_S:
            torch.mm(self._matrices[number % _MATRICES], self._matrices[(number + 1) % _MATRICES])
            number += 1
        while time.perf_counter() < end:
            pass
        return time.perf_counter() - began


def _attempted(part: Part, compute: Callable[[], float]) -> Callable[[], float]:
    return lambda: part.attempt(compute)


def steps(session: Session, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Figures 1 and 2. Collective. Returns, by kind of step and then by name of the measurement, the seconds of each
    step on the rank that took longest, in blocks; and the seconds of what comes once in a window of steps."""
    folder = Path(settings["directory"])
    records = RecordWriter(folder / f"rank-{session.rank}.jsonl")
    stop = StopPart(session)
    stragglers = StragglersPart(session, folder=folder, records=records)
    guards = GuardsPart(session, folder=folder, records=records)
    kinds: dict[str, list[Part]] = {
        WITHOUT: [], "stop": [stop], "stragglers": [stragglers], "guards": [guards],
        ALL: [stop, stragglers, guards],
    }  # fmt: skip
    loop = Loop(session)
    order = random.Random(settings["seed"])  # the same on every rank
    names = ("step", "wall", "cpu")
    mine: dict[str, dict[str, list[list[float]]]] = {kind: {name: [] for name in names} for kind in kinds}
    for number in range(-1, settings["rounds"]):  # the first one is not kept
        for kind in order.sample(list(kinds), len(kinds)):
            block = [loop.step(kinds[kind]) for _ in range(settings["block"])]
            if number >= 0:
                for name in names:
                    mine[kind][name].append([one[name] for one in block])
    every = all_gather_json(session.world, mine)
    found = {
        kind: {name: np.max([rank[kind][name] for rank in every], axis=0).tolist() for name in names}
        for kind in kinds
    }
    windows = {
        "stragglers": _windows(session, stragglers, fill=stragglers.fill_window, times=settings["windows"]),
        "guards": _windows(session, guards, fill=lambda: None, times=settings["windows"]),
    }
    loop.close()
    records.close()
    return {"steps": found, "windows": windows}


def _windows(session: Session, part: Part, *, fill: Callable[[], None], times: int) -> list[float]:
    """Returns the seconds of each `part.window()` on the rank that took longest. Collective."""
    mine = []
    for _ in range(times):
        fill()
        session.world.barrier()
        began = time.perf_counter()
        part.window()
        mine.append(time.perf_counter() - began)
    return list(map(max, zip(*all_gather_json(session.world, mine), strict=True)))


def judging(session: Session, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Figure 3: seconds in which rank 0 judges a window, by number of ranks, without the all-gather."""
    found = {}
    draw = np.random.default_rng(settings["seed"])
    for num_ranks in settings["ranks"]:
        judge = SlowRanks(Topology.from_node_names([f"node{rank // 4}" for rank in range(num_ranks)]))
        seconds = []
        for _ in range(settings["repeats"]):
            numbers = draw.normal(STEP_S, 0.002, (num_ranks, len(COLUMNS)))
            began = time.perf_counter()
            judge.observe(numbers)
            seconds.append(time.perf_counter() - began)
        found[str(num_ranks)] = seconds
    return found


CASES: dict[str, Callable[[Session, Mapping[str, Any]], Any]] = {"steps": steps, "judging": judging}


def main(case: str, settings_path: str, result_path: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    faulthandler.dump_traceback_later(0.95 * settings["timeout_s"], exit=False)
    session = init(backend="mpi", device="cpu", timeout_s=settings["timeout_s"])
    try:
        result = CASES[case](session, settings)
        started = all_gather_json(session.world, this_rank())
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        session.world.abort(1)
    if session.rank == 0:
        Path(result_path).write_text(json.dumps({"value": result, "ranks": started}))
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
