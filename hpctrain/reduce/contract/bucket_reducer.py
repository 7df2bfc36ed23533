"""`BucketReducer`, the interface between the updater and the algorithms that sum a bucket over all ranks."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, final, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective, check_same
from hpctrain.errors import BufferMismatch, UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket

Numbers: TypeAlias = NDArray[np.float64]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A block of a global tensor, for a checkpoint. A block that is the whole tensor is the same on all ranks."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@runtime_checkable
class Chooser(Protocol):
    """Optional: a reducer that chose its algorithms by measurement.

    Sums by different algorithms differ in the last bits, so a resumed run must choose the same ones.
    """

    def choice_state(self) -> dict[str, Any]:
        """Returns the chosen algorithms and bucket size as JSON for a checkpoint; the same on every rank."""

    def recall(self, saved: Mapping[str, Any]) -> int:
        """Restores a saved choice, from the next plan on. Returns the bucket size in bytes. Not collective."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """What the ranks know when the reductions of a step have ended: the same bits on every rank.

    norm_square: sum of the squares of all gradients as they are in the buckets; infinite or NaN if one of them is.
    numbers: sums over the ranks of the numbers that `finish` was given, shape (n,), float64.
    """

    norm_square: float
    numbers: Numbers


# Turns, as those of `BucketReducer.reduce`; the last one returns the result.
Finishing: TypeAlias = Generator[bool, None, Reduced]


@runtime_checkable
class InBackground(Protocol):
    """Optional: reductions that a thread outside Python continues once they have begun."""

    def in_background(self, number: int) -> bool:
        """Returns True if the reduction of bucket `number` is one of these; the same on every rank. Not collective.

        Its first `next` then does not wait for other ranks, so it is started within backward even where no core is free
        for a thread of hpctrain.
        """


class BucketReducer(Protocol):
    """Sums buckets of gradients over all ranks, several at a time.

    Every rank plans the same buckets and reduces them in the same order.
    """

    @property
    def algorithm(self) -> str:
        """Name of the algorithm that runs, as in the recipe."""

    @property
    def wire(self) -> str:
        """Name of the wire format, as in the recipe."""

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        """Returns zeroed memory for each bucket: shape (bucket.numel,), dtype bucket.dtype, on `device`. Collective.

        A second call replaces the buckets of the first and keeps the error feedback of each parameter. Raises
        BufferMismatch on every rank, naming the rank that differs, unless all ranks plan the same.
        """

    def reduce(self, number: int) -> Iterator[bool]:
        """Sums bucket `number` over all ranks, in place, in the memory that `plan` returned. Collective.

        A generator: each `next` works as far as it can without waiting. It yields True when it made progress, False
        when it waits for another rank, and ends when the bucket holds the sum, the same bits on every rank. Several
        reductions may be in flight. Every rank begins them in the same order, but later turns come in an order that
        differs between ranks; so a reducer of blocking collectives calls all of them in the first `next`.
        """

    def keep_squares(self) -> None:
        """From the next plan on, each step ends with `finish`. Not collective."""

    def begin_step(self, factor: float) -> float:
        """Asks for sums that are multiplied by `factor`, until this is called again. Not collective.

        factor: the same on every rank. Returns the factor by which they are multiplied, the same on every rank:
        `factor` where that costs no further pass over the gradients, else 1.
        """

    def filled(self, number: int, num_elems: int) -> None:
        """Announces that the first `num_elems` elements of bucket `number` are written. Not collective.

        Its reduction may begin with them, and overwrite them. A rank need not announce anything.
        """

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        """Ends the reductions of a step: returns turns that compute the norm and sum `numbers`. Collective.

        numbers: shape (n,), float64, overwritten with the sums; n is the same on every rank. comm: all ranks, for
        reducers without a faster way. Call it, on every rank alike, before the first reduction of the step begins, so
        that the numbers can travel with it, or after the last has ended; take the turns after the last has ended.
        """

    def settle(self, *, applied: bool, rescale: float) -> None:
        """Ends the step for error feedback: its values count as sent only if the step was `applied`.

        applied: the same on every rank. rescale: next loss scale divided by this step's. Not collective.
        """

    def bytes_sent(self) -> int:
        """Returns the payload bytes that this rank has sent to other nodes so far. Not collective."""

    def state(self) -> list[StateTensor]:
        """Returns what a checkpoint must hold: error feedback, low-rank factors. Not collective; may be empty."""

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """Returns which rows of a checkpoint's tensors `load_state` needs on this rank; it needs all of the others.

        shapes: of the whole tensors, by name; the checkpoint may be of another number of ranks. Ascending rows. Call it
        after `plan`. Not collective.
        """

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Restores `state`. Collective. Call it after `plan`.

        tensors: of a checkpoint, by name: whole, or only the rows (along the first dimension) of `rows_to_load`, one
        after another. shapes: of the whole tensors; None: `tensors` are whole. Missing tensors (of another wire format)
        start as in a new run; unknown names are ignored. Raises CheckpointError on every rank if they are of another
        model.
        """

    def close(self) -> None:
        """Frees memory and communicators. Collective."""


# Checks, before the first byte is sent, that every rank reduces the same buckets in the same way.


def check_same_plan(comm: Collective, buckets: Sequence[Bucket], *, how: str) -> None:
    """Raises BufferMismatch on every rank, naming the ranks that differ, unless all pass the same plan. Collective.

    how: the reducer's name and settings, as one line.
    """
    layout = repr([
        (str(b.dtype), b.numel, [(s.parameter, s.offset, s.numel, s.used_flag) for s in b.slots]) for b in buckets
    ])  # fmt: skip
    sizes = " + ".join(f"{b.numel} x {str(b.dtype).removeprefix('torch.')}" for b in buckets[:4])
    more = f" + {len(buckets) - 4} more" if len(buckets) > 4 else ""
    mark = hashlib.blake2b(layout.encode(), digest_size=4).hexdigest()
    check_same(
        comm, name="the plan of gradient buckets", value=f"{how}: {sizes}{more} (layout {mark})",
        error=BufferMismatch,
    )  # fmt: skip


def check_dtypes(buckets: Sequence[Bucket], *, what: str) -> None:
    """Raises UsageError unless all buckets are float32 or float64; on all ranks if `check_same_plan` passed."""
    for bucket in buckets:
        if bucket.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{what} reduction needs buckets of float32 or float64, not {bucket.dtype}", agreed=True
            )


# Polls reductions until they end: spins briefly, then sleeps, longer each time.


Result = TypeVar("Result")

# Sleeps between polls: short enough for a fast reaction to messages, long enough to leave a shared core to backward.
SHORTEST_WAIT_S = 20e-6
LONGEST_WAIT_S = 200e-6
# Where ranks outnumber their cores a poll takes processor time from a rank that computes, and the reaction to a message
# waits for the core anyway.
LONGEST_WAIT_CROWDED_S = 2e-3
# A caller with nothing else to do first spins for this long: the kernel rounds the shortest sleep up to about 70 us,
# and a rank that sleeps while the last one arrives delays that one in turn.
SPIN_S = 500e-6


@final
class Backoff:
    """Waits between polls that found no progress: not at all at first, then in sleeps that double up to a limit."""

    def __init__(
        self, *, shortest_wait_s: float = SHORTEST_WAIT_S, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._shortest_wait_s = shortest_wait_s
        self._longest_wait_s = longest_wait_s
        self.reset()

    def reset(self) -> None:
        """Resets the waits: the last poll found progress."""
        self._since: float | None = None
        self._wait_s = self._shortest_wait_s

    def wait(self, sleep: Callable[[float], object] = time.sleep, *, eager: bool) -> None:
        """Waits once. eager: no other thread of this process needs the core, so spin first."""
        if eager:
            now = time.perf_counter()
            if self._since is None:
                self._since = now
            if now < self._since + SPIN_S:
                os.sched_yield()  # for another rank, if ranks share cores
                return
        sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, self._longest_wait_s)


def result_of(turns: Generator[bool, None, Result]) -> Result:
    """Takes all turns on the calling thread, waiting as `step` does in training. Returns the generator's result."""
    found: list[Result] = []

    def until_result() -> Iterator[bool]:
        found.append((yield from turns))

    run_to_end([until_result()])
    return found[0]


def run_to_end(reductions: Sequence[Iterator[bool]]) -> None:
    """Polls the reductions alternately until all have ended, on the calling thread; waits as `step` does in
    training."""
    in_flight = list(reductions)
    backoff = Backoff()
    while in_flight:
        progressed = False
        for reduction in list(in_flight):
            try:
                progressed |= next(reduction)
            except StopIteration:
                in_flight.remove(reduction)
                progressed = True
        if progressed:
            backoff.reset()
        else:
            backoff.wait(eager=True)


def until(ready: Callable[[], bool]) -> Iterator[bool]:
    """Polls `ready` and ends when it returns True. Yields at each other poll: True (progress was made before) at the
    first, then False (no progress)."""
    progressed = True
    while not ready():
        yield progressed
        progressed = False


def one_round(active: deque[Iterator[bool]]) -> Iterator[bool]:
    """Advances each generator once and removes those that have ended. Yields True if any made progress."""
    progressed = False
    for _ in range(len(active)):
        chunk = active.popleft()
        try:
            progressed |= next(chunk)
        except StopIteration:
            progressed = True
        else:
            active.append(chunk)
    yield progressed
