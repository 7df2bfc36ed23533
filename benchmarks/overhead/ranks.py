"""What the ranks do for the cost of stopping, comparing the ranks and the guards.

Each part makes in a step the calls that `hpctrain/train/loop/training.py` makes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.overhead.suite import ALL, STEP_S, WINDOW_S, WITHOUT
from benchmarks.ranks import Case, Settings
from hpctrain.comm import all_gather_json
from hpctrain.data import Batch
from hpctrain.reduce import StepOutcome
from hpctrain.resilience import Divergence, DivergenceLimits, EndTime, StopRequest, TimeToStop, WallClock
from hpctrain.run import Session
from hpctrain.stragglers import COLUMNS, SlowRankLimits, SlowRanks
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.topology import Topology
from hpctrain.train import DataBalance, EarlyEnd, Guards, MemoryGuard, StragglerWatch

WINDOW_STEPS = round(WINDOW_S / STEP_S)
_ROWS = 8
_JUMP_Z, _LOSS_WINDOW = 20.0, 100
WIDTH = 256
# Before the calls that are timed, a step multiplies matrices, which takes their data out of the caches, and then spins.
_SPIN_S = 0.003
_MATRICES = 32  # 8 MB


def silent(text: str) -> None:
    """Prints nothing; the parts have nothing to report here."""


class Part:
    """What a part does in a step. A part of its own class overrides what it needs."""

    def attempt(self, compute: Callable[[], float]) -> float:
        """Calls forward and backward, and returns the loss."""
        return compute()

    def votes(self) -> dict[str, float]:
        """Returns this rank's contributions to the step's sum."""
        return {}

    def accepts(self, grad_norm: float, sums: Mapping[str, float]) -> bool:
        """Is called between the reduction and the optimizer's step."""
        return True

    def after(self, step: int, outcome: StepOutcome, *, step_s: float) -> None:
        """Is called after the optimizer's step. Collective. step_s: seconds of the step so far."""

    def window(self) -> None:
        """Does what comes once in `WINDOW_STEPS` steps. Collective."""


class StopPart(Part):
    """The agreement on a stop, with full windows of the times whose p95 says when a stop must begin."""

    def __init__(self, session: Session) -> None:
        ends = [EndTime(at_s=time.time() + 86_400, source="benchmark")]
        self._stopping = EarlyEnd(
            StopRequest().install(),
            comm=session.world,
            plan=TimeToStop(margin_s=30.0),
            clock=WallClock(ends) if session.rank == 0 else None,
        )
        plan = self._stopping.plan
        for times in (plan.steps, plan.saves, plan.evaluations):
            for number in range(100):
                times.add(STEP_S + number / 1000)

    def votes(self) -> dict[str, float]:
        return self._stopping.votes(num_saves=2, evaluates=True)

    def after(self, step: int, outcome: StepOutcome, *, step_s: float) -> None:
        if self._stopping.agreed(outcome.sums):
            raise RuntimeError("the benchmark was asked to stop")
        self._stopping.plan.steps.add(step_s)


class StragglersPart(Part):
    """The steps' times, and the comparison of the ranks, which `window` does and no step."""

    def __init__(self, session: Session, *, folder: Path, records: RecordWriter) -> None:
        def watch(window_s: float) -> StragglerWatch:
            return StragglerWatch(
                session.world, session.topology, window_s=window_s, limits=SlowRankLimits(), probes=False,
                directory=folder, records=records, say=silent, clock=StepClock(),
            )  # fmt: skip

        self._watch = watch(86_400.0)
        self._compared = watch(0.0)

    def votes(self) -> dict[str, float]:
        return self._watch.votes()

    def after(self, step: int, outcome: StepOutcome, *, step_s: float) -> None:
        self._watch.after_step(
            step, _seconds(step_s, outcome.exposed_sync_s), samples=_ROWS, sums=outcome.sums
        )

    def fill_window(self) -> None:
        """Adds the steps of a window, which `window` then compares. Not collective."""
        for _ in range(WINDOW_STEPS - 1):
            self._compared.after_step(0, _seconds(STEP_S, 0.001), samples=_ROWS, sums=_NOTHING)

    def window(self) -> None:
        self._compared.after_step(
            0, _seconds(STEP_S, 0.001), samples=_ROWS, sums={**_NOTHING, "window_ends": 1}
        )


class GuardsPart(Part):
    """The guards against divergence, want of memory and unequal shares, with a full window of losses."""

    def __init__(self, session: Session, *, folder: Path, records: RecordWriter) -> None:
        divergence = Divergence(DivergenceLimits(jump_z=_JUMP_Z, window=_LOSS_WINDOW))
        for step in range(_LOSS_WINDOW):
            divergence.after_step(step, loss=1.0 + (step * 37 % 101) / 200, applied=True, why_not=None)
        memory = MemoryGuard(
            folder, comm=session.world, recovers=True, rows=_ROWS, micro_batches=1, largest=None, say=silent,
            records=records,
        )  # fmt: skip
        balance = DataBalance(comm=session.world, most_excess=0.1, say=silent, records=records)
        self._guards = Guards(
            divergence, memory=memory, balance=balance, roll_back=lambda choose: None, skips_data=False,
            say=silent, records=records,
        )  # fmt: skip
        fields = {"x": torch.ones(_ROWS, 1)}
        self._batch = Batch(
            fields=fields, epoch=0, start=0, num_samples=_ROWS, global_samples=_ROWS * session.world_size
        )

    def attempt(self, compute: Callable[[], float]) -> float:
        return self._guards.memory.attempt(lambda parts: compute())

    def votes(self) -> dict[str, float]:
        return self._guards.memory.votes()

    def accepts(self, grad_norm: float, sums: Mapping[str, float]) -> bool:
        return self._guards.accepts(grad_norm, sums)

    def after(self, step: int, outcome: StepOutcome, *, step_s: float) -> None:
        if self._guards.memory.ran_out(outcome.sums) or not outcome.applied:
            raise RuntimeError(f"a step was dropped: {outcome}")
        self._guards.after_update(step, outcome)
        self._guards.balance.add(self._batch)

    def window(self) -> None:
        """Ends an epoch of `WINDOW_STEPS` steps, after which the ranks compare their samples."""
        self._guards.balance.epoch_ended(0, step=0)


_NOTHING = {"window_ends": 0.0, "probe_links": 0.0}


def _seconds(step_s: float, wait_s: float) -> dict[str, float]:
    return {
        "input": 0.0, "compute": step_s - wait_s, "bubble": 0.0, "exposed_sync": wait_s, "checkpoint": 0.0,
        "evaluation": 0.0, "other": 0.0, "step": step_s,
    }  # fmt: skip


# ---------------------------------------------------------------------- the loop


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


def steps(session: Session, settings: Settings) -> dict[str, Any]:
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


def judging(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Figure 3: returns by number of ranks the seconds in which rank 0 judges a window, without the all-gather."""
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


CASES: dict[str, Case] = {"steps": steps, "judging": judging}
