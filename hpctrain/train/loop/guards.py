"""What protects a run from its own steps: divergence, memory that runs out, ranks with unequal shares of the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

from hpctrain.reduce import StepOutcome
from hpctrain.resilience import Divergence
from hpctrain.telemetry import RecordWriter
from hpctrain.train.loop.data_balance import DataBalance
from hpctrain.train.loop.memory_guard import MemoryGuard
from hpctrain.train.state.resumption import Resumed
from hpctrain.train.task.mean_loss import LOSS_WEIGHT, with_mean_loss

# Restores the run's state from the checkpoint that the function chooses among the saved steps, and sets later ones
# aside. Collective. Returns None, with nothing changed, if it chooses none.
RollBack = Callable[[Callable[[list[int]], int | None]], Resumed | None]


@final
class Guards:
    """The guards of a run. Decisions follow from sums over the ranks, so they are the same on every rank.

    roll_back: restores an older state. skips_data: after a roll-back the run continues with the data that
    follow those on which it diverged, instead of repeating them. say: prints a line, on rank 0.
    """

    def __init__(
        self,
        divergence: Divergence,
        *,
        memory: MemoryGuard,
        balance: DataBalance,
        roll_back: RollBack,
        skips_data: bool,
        say: Callable[[str], None],
        records: RecordWriter,
    ) -> None:
        self.divergence = divergence
        self.memory = memory
        self.balance = balance
        self.skips_data = skips_data
        self._roll_back = roll_back
        self._say = say
        self._records = records
        self._why_not: str | None = None  # of the step that the updater makes

    def accepts(self, grad_norm: float, sums: Mapping[str, float]) -> bool:
        """For `DistributedOptimizer.step`: False if a rank ran out of memory, if the loss is not finite or jumps, or
        if no loss counts."""
        if self.memory.ran_out(sums):
            return False
        if sums.get(LOSS_WEIGHT) == 0:
            self._why_not = "the losses of all ranks have weight 0"
        else:
            loss = with_mean_loss(sums)["loss"]
            self._why_not = self.divergence.why_not(loss=loss, grad_norm=grad_norm)
        return self._why_not is None

    def after_update(self, step: int, outcome: StepOutcome) -> None:
        """Notes the outcome of `step`. Not collective. Raises DivergedError on every rank if too many were dropped."""
        divergence, why_not = self.divergence, self._why_not
        if why_not is not None:
            if divergence.skipped_in_row == 0:
                self._say(f"step {step} is skipped on all ranks: {why_not}")
            self._records.write({
                "kind": "loss_jump", "time": time.time(), "step": step, "loss": outcome.sums["loss"],
                "grad_norm": outcome.grad_norm, "reason": why_not,
            })  # fmt: skip
        divergence.after_step(step, loss=outcome.sums["loss"], applied=outcome.applied, why_not=why_not)

    @property
    def may_save(self) -> bool:
        """False while steps are dropped: the state may be spoiled, and a save may delete the last good checkpoint."""
        return self.divergence.skipped_in_row == 0

    def roll_back(self) -> Resumed | None:
        """Restores an older state, and lowers the learning rate. Collective. Returns None if that is not possible."""
        if not self.divergence.may_roll_back:
            return None
        resumed = self._roll_back(self.divergence.choose)
        if resumed is not None:
            self.divergence.rolled_back(resumed.divergence, step=resumed.position.step)
        return resumed
