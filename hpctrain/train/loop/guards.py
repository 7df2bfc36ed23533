"""Protects a run against divergence, lack of memory and unequal shares of the data."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

import torch

from hpctrain.comm import Collective, all_gather_distinct, describe_ranks, on_rank_0
from hpctrain.data import Batch
from hpctrain.errors import LaunchError, OutOfMemory
from hpctrain.reduce import StepOutcome
from hpctrain.resilience import (
    Divergence,
    free_memory,
    give_back_freed_memory,
    give_back_once,
    num_parts,
    shortage,
)
from hpctrain.telemetry import RecordWriter, write_json
from hpctrain.train.state.training_state import Resumed
from hpctrain.train.task.loss_weights import LOSS_WEIGHT, with_mean_loss

# Compares how many samples each rank computes in an epoch: a rank with more of them makes all others wait
# (F10).


@final
class DataBalance:
    """Counts this rank's samples and their bytes, and compares the ranks at the end of each epoch.

    most_excess: the fraction by which a rank may exceed the mean of the ranks. A larger excess is reported once per
    run.
    """

    def __init__(
        self, *, comm: Collective, most_excess: float, say: Callable[[str], None], records: RecordWriter
    ) -> None:
        self._comm = comm
        self._most_excess = most_excess
        self._say = say
        self._records = records
        self._num_samples = 0
        self._num_bytes = 0
        self._noted: set[str] = set()

    def add(self, batch: Batch) -> None:
        """Counts a batch that this rank has computed. Not collective."""
        self._num_samples += batch.num_samples
        self._num_bytes += batch.num_bytes

    def epoch_ended(self, epoch: int, *, step: int) -> None:
        """Compares the ranks after `step`, the last step of `epoch`, and resets the counts.

        Collective: an all-gather of 16 bytes from each rank.
        """
        num_ranks = self._comm.num_ranks
        if num_ranks == 1:
            return
        mine = torch.tensor([self._num_samples, self._num_bytes], dtype=torch.int64)
        self._num_samples = self._num_bytes = 0
        gathered = self._comm.all_gather(mine, counts=[2] * num_ranks).view(num_ranks, 2)
        samples, num_bytes = gathered.T.tolist()
        self._records.write({
            "kind": "data_balance", "time": time.time(), "step": step, "epoch": epoch,
            "samples": _spread(samples), "bytes": _spread(num_bytes),
        })  # fmt: skip
        for what, counts in (("samples", samples), ("bytes of samples", num_bytes)):
            found = describe_excess(counts, what=what, most_excess=self._most_excess)
            if found is not None and what not in self._noted:
                self._noted |= {"samples", "bytes of samples"} if what == "samples" else {what}
                self._say(f"epoch {epoch}: {found}")


def describe_excess(counts: Sequence[int], *, what: str, most_excess: float) -> str | None:
    """Returns a message about the rank with the highest count; None if the counts are balanced.

    counts: the count of each rank.
    what: the counted things, for the message.
    most_excess: the fraction by which the highest count may exceed the mean.
    """
    mean, most = sum(counts) / len(counts), max(counts)
    if most <= mean * (1 + most_excess):
        return None
    rank, least = counts.index(most), min(counts)
    return (
        f"rank {rank} had {most:,} {what}, {most / mean - 1:.0%} more than the mean of {len(counts)} ranks "
        f"({mean:,.1f}; rank {counts.index(least)} had {least:,}): the others wait for it. Ranks have equal shares if "
        "their number divides data.global_batch and no samples are left out as damaged"
    )


def _spread(counts: Sequence[int]) -> dict[str, float]:
    """Returns the lowest, mean and highest count, and the ranks with the lowest and with the highest count."""
    least, most = min(counts), max(counts)
    return {
        "least": least, "least_rank": counts.index(least), "mean": sum(counts) / len(counts),
        "most": most, "most_rank": counts.index(most),
    }  # fmt: skip


# Divides a rank's share of a batch into more micro-batches when a rank runs out of memory (F6).


T = TypeVar("T")

# The file in the run directory with the largest size of micro-batches.
MICRO_BATCH = "micro-batch.json"
_VOTE = "out_of_memory"


def largest_micro_batch(directory: Path, *, comm: Collective) -> int | None:
    """Returns the largest number of samples per micro-batch that an earlier start recorded. Collective.

    Returns None if no limit was recorded. Raises LaunchError on every rank if the file cannot be read.
    """

    def read() -> int | None:
        path = directory / MICRO_BATCH
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["samples"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"{path}, which holds the largest micro-batch that fits into memory, cannot be read "
                f"({type(error).__name__}: {error}): delete it to begin with data.micro_batches again"
            ) from error

    found: int | None = on_rank_0(comm, read)
    return found


@final
class MemoryGuard:
    """Holds the number of micro-batches per step, and doubles it after a rank has run out of memory.

    The ranks agree through the sums of a step: each rank contributes `votes`, and `ran_out` reads the sums. A rank that
    has run out of memory still takes part in all reductions of the step, with the gradients that exist by then. No rank
    uses the results of these reductions (see `accepts` of `DistributedOptimizer.step`), so buckets that ranks have
    already sent do no harm.

    Args:
        directory: The run directory.
        recovers: True: the number of micro-batches is doubled. False: the run ends if a rank runs out of memory.
        rows: The largest number of samples of a global batch on any rank.
        micro_batches: The number of micro-batches in the recipe.
        largest: The result of `largest_micro_batch`.
        short_attempt: The number of the previous attempt of `hpctrain supervise`, if that attempt ended out of memory;
            None otherwise. Usually the kernel has then killed a rank before the number of micro-batches could be
            doubled. So the constructor doubles this number, and is then collective.
        say: A function that prints a line for the user, on rank 0.
    """

    def __init__(
        self,
        directory: Path,
        *,
        comm: Collective,
        recovers: bool,
        rows: int,
        micro_batches: int,
        largest: int | None,
        short_attempt: int | None = None,
        say: Callable[[str], None],
        records: RecordWriter,
    ) -> None:
        self._path = directory / MICRO_BATCH
        self._comm = comm
        self._recovers = recovers
        self._rows = rows
        self._say = say
        self._records = records
        self._shortage: str | None = None  # the allocation that failed on this rank in this step
        self._missed: str | None = None  # the same in a local step, which the other ranks do not know yet
        self._has_updated = False
        self.num_shortages = 0
        self.num_parts = micro_batches
        if recovers and largest is not None:
            self.num_parts = num_parts(rows, largest_part=max(1, largest), at_least=micro_batches)
        divides = recovers and short_attempt is not None and self.largest > 1
        if divides:
            self._double({"time": time.time(), "attempt": short_attempt})
        if self.num_parts > micro_batches:
            give_back_freed_memory()
            why = (
                f"attempt {short_attempt} ended out of memory"
                if divides
                else "a rank ran out of memory before"
            )
            say(
                f"micro-batches: {self.num_parts} of at most {self.largest} sample{'s' if self.largest > 1 else ''}, "
                f"since {why} ({self._path}; delete it to begin with data.micro_batches = {micro_batches} again)"
            )

    @property
    def largest(self) -> int:
        """The largest number of samples in a micro-batch."""
        return -(-self._rows // self.num_parts)

    @property
    def is_short(self) -> bool:
        """True if this rank ran out of memory in the last call of `attempt`."""
        return self._shortage is not None

    def attempt(self, compute: Callable[[int], float]) -> float:
        """Returns `compute(num_parts)`, the loss of this rank's share, or 0 if this rank ran out of memory.

        Not collective. If the run does not recover, raises OutOfMemory on this rank only.
        """
        self._shortage = None
        try:
            return compute(self.num_parts)
        except (RuntimeError, MemoryError) as error:
            asked = shortage(error)
            if asked is None:
                raise
            if not self._recovers:
                self._end(error, asked=asked, where="forward and backward")
            self._shortage = asked
        # Only here: the error's traceback held the activations.
        free_memory()
        give_back_freed_memory()
        return 0.0

    def update(self, step: Callable[[], T]) -> T:
        """Returns `step()`, which reduces the gradients and steps the optimizer.

        If this rank runs out of memory, raises OutOfMemory, on this rank only, since smaller micro-batches would not
        help. The first call creates the optimizer's state; afterwards the free memory between the tensors of the state
        is returned to the system.
        """
        try:
            found = step()
        except (RuntimeError, MemoryError) as error:
            asked = shortage(error)
            if asked is None:
                raise
            self._end(error, asked=asked, where="the reduction or the optimizer's step")
        if not self._has_updated:
            self._has_updated = True
            give_back_once()
        return found

    def votes(self, *, local: bool = False) -> dict[str, float]:
        """Returns the number that this rank adds to the sums of a step, by name. Not collective.

        local: True for a local step of a schedule, whose sums are those of this worker. If this rank has run out of
        memory, all ranks learn it in the next step with a vote.
        """
        if local:
            self._missed = self._missed or self._shortage
            return {_VOTE: float(self._shortage is not None)}
        return {_VOTE: float((self._shortage or self._missed) is not None)}

    def ran_out(self, sums: Mapping[str, float]) -> bool:
        """Returns True if any rank ran out of memory in this step; the same on every rank."""
        return sums[_VOTE] > 0

    def divide(self, step: int) -> None:
        """Doubles the number of micro-batches. Collective; call it after `ran_out` has returned True.

        Raises OutOfMemory on every rank if the micro-batches have only one sample each.
        """
        who, asked = self._who()
        self._missed = None
        if self.largest == 1:
            raise OutOfMemory(
                f"step {step}: {who} ran out of memory{asked} in a micro-batch of one sample, which cannot be divided: "
                "use a smaller model or smaller samples, activation checkpointing, run.precision = 'bf16', or more "
                "memory for each rank",
                agreed=True,
            )
        before = self.num_parts
        self.num_shortages += 1
        self._double({
            "time": time.time(), "step": step, "ranks": who, "asked": asked.removeprefix(", asking for "),
        })  # fmt: skip
        self._say(
            f"step {step}: {who} ran out of memory{asked}: {self.num_parts} micro-batches instead of {before} from now "
            f"on, of at most {self.largest} sample{'s' if self.largest > 1 else ''}; the batch is computed again"
        )

    # ------------------------------------------------------------------ details

    def _double(self, event: dict[str, Any]) -> None:
        """Doubles the number of micro-batches, and records the new number. Collective.

        event: fields of the record that state the cause.
        """
        self.num_parts *= 2
        event |= {"micro_batches": self.num_parts, "samples": self.largest}
        self._records.write({"kind": "out_of_memory", **event})
        on_rank_0(self._comm, lambda: self._remember(event))

    def _who(self) -> tuple[str, str]:
        """Returns two texts: which ranks ran out of memory, with their hosts; and the allocation that failed.

        The allocation is that of the first of these ranks. Collective.
        """
        found = self._missed if self._shortage is None else self._shortage
        mine = None if found is None else [socket.gethostname(), found]
        values, value_of_rank = all_gather_distinct(self._comm, mine)
        short = [rank for rank, number in enumerate(value_of_rank) if values[number] is not None]
        hosts = sorted({values[value_of_rank[rank]][0] for rank in short})
        asked = next((text for rank in short if (text := values[value_of_rank[rank]][1])), "")
        return f"{describe_ranks(short)} on {', '.join(hosts)}", f", asking for {asked}" if asked else ""

    def _remember(self, event: dict[str, Any]) -> None:
        try:
            write_json(self._path, event)
        except OSError as error:
            self._say(
                f"note: {self._path} cannot be written ({error.strerror}): the next start runs out of memory again"
            )

    def _end(self, error: BaseException, *, asked: str, where: str) -> NoReturn:
        amount = f", asking for {asked}," if asked else ""
        raise OutOfMemory(
            f"out of memory{amount} in {where}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


# What protects a run from its own steps.


# Restores the run's state from the checkpoint that the function chooses among the saved steps, and sets later ones
# aside. Collective. Returns None, with nothing changed, if it chooses none.
RollBack = Callable[[Callable[[list[int]], int | None]], Resumed | None]


@final
class Guards:
    """The guards of a run. Decisions follow from sums over the ranks, so that they are the same on every rank.

    Args:
        divergence: The guard against divergence.
        memory: The guard against lack of memory.
        balance: The comparison of the ranks' shares of the data.
        roll_back: A function that restores an older state.
        skips_data: True: a run that is rolled back continues after the data on which it diverged. False: the run
            repeats the data since the checkpoint.
        say: A function that prints a line for the user, on rank 0.
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
        """Returns False if a step must be dropped. `DistributedOptimizer.step` calls this method.

        A step is dropped if a rank ran out of memory, if the loss is not finite or jumps, or if all losses have
        weight 0.
        """
        if self.memory.ran_out(sums):
            return False
        if sums.get(LOSS_WEIGHT) == 0:
            self._why_not = "the losses of all ranks have weight 0"
        else:
            loss = with_mean_loss(sums)["loss"]
            self._why_not = self.divergence.why_not(loss=loss, grad_norm=grad_norm)
        return self._why_not is None

    def accepts_alone(self, grad_norm: float, sums: Mapping[str, float]) -> bool:
        """Returns False if this worker must drop a local step of a schedule: a rank of it ran out of memory.

        The loss is looked at in steps with a vote only, in which all ranks decide alike.
        """
        return not self.memory.ran_out(sums)

    def after_update(self, step: int, outcome: StepOutcome) -> None:
        """Records the outcome of `step`.

        Raises DivergedError on every rank if too many steps were dropped. Not collective.
        """
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
        """False while steps are being dropped.

        The state may then be bad, and a save of a bad state might delete the last good checkpoint.
        """
        return self.divergence.skipped_in_row == 0

    def roll_back(self) -> Resumed | None:
        """Restores an older state and lowers the learning rate.

        Returns None if no roll-back is possible. Collective.
        """
        if not self.divergence.may_roll_back:
            return None
        resumed = self._roll_back(self.divergence.choose)
        if resumed is not None:
            self.divergence.rolled_back(resumed.divergence, step=resumed.position.step)
        return resumed
