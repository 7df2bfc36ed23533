"""Divides a rank's share of a batch into more micro-batches when a rank runs out of memory (F6)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

from hpctrain.comm import Collective, all_gather_distinct, describe_ranks, on_rank_0
from hpctrain.errors import LaunchError, OutOfMemory
from hpctrain.resilience import give_back_freed_memory, give_back_once, num_parts, release, shortage
from hpctrain.telemetry import RecordWriter, write_json

T = TypeVar("T")

# In the run directory: how large micro-batches may be.
MICRO_BATCH = "micro-batch.json"
_VOTE = "out_of_memory"


def largest_micro_batch(directory: Path, *, comm: Collective) -> int | None:
    """Returns how many samples a micro-batch may have, as an earlier start of the run found out; None: any. Collective.

    Raises LaunchError on every rank if the file cannot be read.
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
    """The number of micro-batches of a rank's share, and its change after a rank ran out of memory.

    The ranks agree through the sums of a step: `votes` are summed, `ran_out` reads the sums. A rank that ran out takes
    part in all reductions of the step with what it has; no rank uses their result (`DistributedOptimizer.step`,
    accepts). So the buckets that other ranks have sent by then do no harm.

    directory: of the run. recovers: False ends the run instead. rows: the most samples of a global batch on any rank.
    micro_batches: of the recipe. largest: samples of a micro-batch, from an earlier start. short_attempt: number of the
    attempt of `hpctrain supervise` before this one, if that ended out of memory (as a rule because the kernel killed a
    rank, which could not divide anything then): the micro-batches are divided at once. say: prints on rank 0.
    Making one is collective if there is a `short_attempt`.
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
        self._shortage: str | None = None  # of this rank, in this step: what it asked for in vain
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
        """The most samples in a micro-batch."""
        return -(-self._rows // self.num_parts)

    @property
    def is_short(self) -> bool:
        """True if this rank's last `attempt` ran out of memory. Not collective."""
        return self._shortage is not None

    def attempt(self, compute: Callable[[int], float]) -> float:
        """Returns `compute(num_parts)`: the loss of this rank's share. 0 if memory was short. Not collective."""
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
        release()
        give_back_freed_memory()
        return 0.0

    def update(self, step: Callable[[], T]) -> T:
        """Returns `step()`, the reduction and the optimizer's step. Raises OutOfMemory, on this rank, if that was short
        of memory: smaller micro-batches would not help. The first one makes the optimizer's state, and what is free
        between its tensors is given back then."""
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

    def votes(self) -> dict[str, float]:
        """This rank's contribution to the sums of a step. Not collective."""
        return {_VOTE: float(self._shortage is not None)}

    def ran_out(self, sums: Mapping[str, float]) -> bool:
        """Returns True if a rank ran out of memory in this step; the same on every rank."""
        return sums[_VOTE] > 0

    def divide(self, step: int) -> None:
        """Doubles the number of micro-batches after `ran_out`. Collective.

        Raises OutOfMemory on every rank if they have one sample already.
        """
        who, asked = self._who()
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
        """Doubles the number of micro-batches, and remembers that with `event`, what made it necessary. Collective."""
        self.num_parts *= 2
        event |= {"micro_batches": self.num_parts, "samples": self.largest}
        self._records.write({"kind": "out_of_memory", **event})
        on_rank_0(self._comm, lambda: self._remember(event))

    def _who(self) -> tuple[str, str]:
        """Returns the ranks that ran out with their hosts, and what the first of them asked for. Collective."""
        mine = None if self._shortage is None else [socket.gethostname(), self._shortage]
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
