"""`BucketReducer`, the interface between an updater and the algorithms that sum a bucket over all ranks.

The functions at the end poll reductions until they are complete.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, final, runtime_checkable

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
    """This rank's block of a global tensor, for a checkpoint.

    A block that covers the whole tensor is the same on all ranks.

    name: name of the global tensor in the checkpoint.
    tensor: the block.
    global_shape: shape of the global tensor.
    offset: index of the block's first element in the global tensor, one entry per dimension.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result of the reductions of a step, with the same bits on every rank.

    norm_square: sum of the squares of all gradients, as they are in the buckets; infinite or NaN if a gradient is not
    finite.
    numbers: sums over the ranks of the numbers passed to `finish`, shape (n,), float64.
    """

    norm_square: float
    numbers: Numbers


# Turns, as those of `BucketReducer.reduce`; the last one returns the result.
Finishing: TypeAlias = Generator[bool, None, Reduced]


@runtime_checkable
class InBackground(Protocol):
    """Optional interface of a reducer. Once a reduction has started, a thread outside Python continues it."""

    def in_background(self, number: int) -> bool:
        """Returns True if the reduction of bucket `number` continues in such a thread; the same on every rank.

        Not collective. The first `next` of such a reduction does not wait for other ranks, so such a reduction is
        started during backward even if no core is free for a thread of hpctrain.
        """


class KeepsState(Protocol):
    """Interface of an object that keeps tensors from step to step, which checkpoints must hold.

    An example are the residuals of error feedback.
    """

    def end_step(self, *, applied: bool, rescale: float) -> None:
        """Ends the step for error feedback: the values of the step count as sent only if the step was applied.

        Not collective.

        Args:
            applied: Whether the step was applied, the same on every rank.
            rescale: The next step's loss scale divided by this step's.
        """

    def state(self) -> list[StateTensor]:
        """Returns the tensors that a checkpoint must hold (error feedback, low-rank factors); possibly none.

        Not collective.
        """

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """Returns the rows of a checkpoint's tensors that `load_state` needs on this rank.

        Not collective; call it after `plan`.

        Args:
            shapes: Shapes of the whole saved tensors, by name. The checkpoint may be from another number of ranks.

        Returns:
            For some tensors, by name, the row ranges that this rank needs, ascending. `load_state` needs all rows of
            tensors that are not in the result.
        """

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Restores `state` from a checkpoint. Collective; call it after `plan`.

        Args:
            tensors: Saved tensors by name. Each is either whole, or the concatenation of the rows from `rows_to_load`
                (along the first dimension). A tensor that is missing, because another wire format was used, starts as
                in a new run; unknown names are ignored.
            shapes: Shapes of the whole tensors, by name; None if `tensors` are whole.

        Raises:
            CheckpointError: On every rank. The tensors belong to another model.
        """


class BucketReducer(KeepsState, Protocol):
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
        """Allocates zeroed memory for each bucket. Collective.

        A second call replaces the buckets of the first, and keeps the error feedback of each parameter.

        Args:
            buckets: The plan, the same on every rank.
            device: Device of the memory.

        Returns:
            One tensor per bucket, of shape (bucket.numel,) and dtype bucket.dtype.

        Raises:
            BufferMismatch: The ranks have different plans. Raised on every rank; the message names the ranks that
                differ.
        """

    def reduce(self, number: int) -> Iterator[bool]:
        """Sums bucket `number` over all ranks, in place in the memory that `plan` returned. Collective.

        Several reductions may be in flight. Every rank starts them in the same order, but the order of later turns
        differs between ranks. A reducer that uses blocking collectives must therefore call all of them in the first
        `next`.

        Args:
            number: Index of the bucket in the plan.

        Returns:
            A generator. Each `next` works as far as possible without waiting, and yields True after progress, False if
            the reduction waits for another rank. The generator ends when the bucket holds the sum, with the same bits
            on every rank.
        """

    def keep_squares(self) -> None:
        """Announces that, from the next plan on, each step ends with `finish`. Not collective."""

    def begin_step(self, factor: float) -> float:
        """Requests that sums are multiplied by `factor`, until the next call of `begin_step`. Not collective.

        Args:
            factor: Requested factor, the same on every rank.

        Returns:
            The factor by which the sums will be multiplied, the same on every rank: `factor` if the multiplication
                needs no further pass over the gradients, otherwise 1.
        """

    def filled(self, number: int, num_elems: int) -> None:
        """Announces that the first `num_elems` elements of bucket `number` are written. Not collective.

        The reduction may then start with these elements, and overwrite them. A call is optional.
        """

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        """Ends the reductions of a step: computes the gradient norm and sums `numbers` over the ranks. Collective.

        Call it on every rank at the same place: either before the first reduction of the step starts, so that the
        numbers can be sent with that reduction, or after the last reduction has ended.

        Args:
            numbers: float64 array of shape (n,), overwritten with the sums; n is the same on every rank.
            comm: Communicator of all ranks, for reducers without a faster method.

        Returns:
            A generator like that of `reduce`, to be run after the last reduction has ended. The generator returns a
            `Reduced`.
        """

    def bytes_sent(self) -> int:
        """Returns the payload bytes that this rank has sent to other nodes so far. Not collective."""

    def close(self) -> None:
        """Frees memory and communicators. Collective."""


def check_same_plan(comm: Collective, buckets: Sequence[Bucket], *, how: str) -> None:
    """Raises BufferMismatch on every rank unless all ranks have the same buckets (sizes, dtypes, order). Collective.

    The error names the ranks that differ.

    how: name and settings of the reducer, as one line; they must be the same on all ranks too.
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
    """Raises UsageError unless all buckets are float32 or float64.

    Call it after `check_same_plan`, so that all ranks raise the error.

    what: name of the wire format, for the message.
    """
    for bucket in buckets:
        if bucket.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{what} reduction needs buckets of float32 or float64, not {bucket.dtype}", agreed=True
            )


Result = TypeVar("Result")

# Sleeps between polls: short enough for a fast reaction to messages, long enough to leave a shared core to backward.
SHORTEST_WAIT_S = 20e-6
LONGEST_WAIT_S = 200e-6
# If there are more ranks than cores, and buckets are reduced during backward, a poll takes processor time from a rank
# that computes.
LONGEST_WAIT_OVERSUBSCRIBED_S = 2e-3
# A caller with nothing else to do first spins for this long: the kernel rounds the shortest sleep up to about 70 us,
# and a rank that sleeps while the last one arrives delays that one in turn.
SPIN_S = 500e-6


@final
class Backoff:
    """Waits between polls that found no progress: sleeps, each twice as long as the previous sleep, up to a limit."""

    def __init__(
        self, *, shortest_wait_s: float = SHORTEST_WAIT_S, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._shortest_wait_s = shortest_wait_s
        self._longest_wait_s = longest_wait_s
        self.reset()

    def reset(self) -> None:
        """Starts with short waits again, after a poll that found progress."""
        self._since: float | None = None
        self._wait_s = self._shortest_wait_s

    def wait(self, sleep: Callable[[float], object] = time.sleep, *, eager: bool) -> None:
        """Waits once.

        eager: True to yield the core instead of sleeping during the first 0.5 ms. Use it if no other thread of this
        process needs the core.
        """
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
    """Runs the generator to its end on the calling thread, as `run_to_end` does, and returns its result."""
    found: list[Result] = []

    def until_result() -> Iterator[bool]:
        found.append((yield from turns))

    run_to_end([until_result()])
    return found[0]


def run_to_end(reductions: Sequence[Iterator[bool]]) -> None:
    """Polls the reductions in turn until all have ended, on the calling thread. Waits with `Backoff` between polls."""
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
    """Polls `ready` until `ready` returns True. After each failed poll, yields whether there was progress.

    The first value is True, because the caller has made progress before the wait; all later values are False.
    """
    progressed = True
    while not ready():
        yield progressed
        progressed = False


def one_round(active: deque[Iterator[bool]]) -> Iterator[bool]:
    """Advances each generator once, and removes those that have ended. Yields True if any generator made progress."""
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
