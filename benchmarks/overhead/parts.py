"""The parts whose cost is measured. Each makes in a step the calls that `hpctrain/train/loop/training.py` makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.overhead.figures import STEP_S, WINDOW_S
from hpctrain.data import Batch
from hpctrain.reduce import StepOutcome
from hpctrain.resilience import Divergence, DivergenceLimits, EndTime, StopPlan, StopRequest, WallClock
from hpctrain.run import Session
from hpctrain.stragglers import Limits
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train import DataBalance, Guards, MemoryGuard, Stopping, StragglerWatch

WINDOW_STEPS = round(WINDOW_S / STEP_S)
_ROWS = 8
_JUMP_Z, _LOSS_WINDOW = 20.0, 100


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
        self._stopping = Stopping(
            StopRequest().install(),
            comm=session.world,
            plan=StopPlan(margin_s=30.0),
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
                session.world, session.topology, window_s=window_s, limits=Limits(), probes=False,
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
        """An epoch of `WINDOW_STEPS` steps ends: the ranks compare their samples."""
        self._guards.balance.epoch_ended(0, step=0)


_NOTHING = {"window_ends": 0.0, "probe_links": 0.0}


def _seconds(step_s: float, wait_s: float) -> dict[str, float]:
    return {
        "input": 0.0, "compute": step_s - wait_s, "bubble": 0.0, "exposed_sync": wait_s, "checkpoint": 0.0,
        "evaluation": 0.0, "other": 0.0, "step": step_s,
    }  # fmt: skip
