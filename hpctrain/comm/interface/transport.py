"""Point-to-point messages and memory shared within a node, for reductions that make their own schedule.

A backend's collective operations block until they are done. A reduction that keeps the network, the node's
memory and the conversions busy at the same time needs operations that it can start and poll.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from hpctrain.topology import Topology

# The backend's handle of an operation in flight.
Pending = Any

# The range of tags that every MPI supports: 0 <= tag < NUM_TAGS.
NUM_TAGS = 32768


@runtime_checkable
class Transport(Protocol):
    """One rank's handle on a separate message space over all ranks. Used by one thread at a time.

    Buffers are contiguous one-dimensional uint8 tensors in host memory. Raises CommunicationError when the
    library reports a failure.
    """

    @property
    def rank(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        """Starts sending `buffer`, shape (n,), uint8; returns a handle. The buffer must not change until `all_done`
        reports the handle as finished."""

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Pending:
        """Starts receiving into `buffer`, shape (n,), uint8, with n of the sender; returns a handle. Messages with
        equal source and tag arrive in order."""

    def all_done(self, pending: Sequence[Pending]) -> bool:
        """Returns True if all are finished. Does not wait; lets the library make progress."""

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        """Returns memory shared by all ranks of this node: one zeroed segment per local rank, of the size that rank
        passed as `num_bytes`.

        Collective over the node. Raises CommunicationError on every rank of the node if the node lacks the memory
        (/dev/shm is too small, for example).
        """

    def fence(self) -> None:
        """Memory fence: orders this rank's accesses to shared memory before the call ahead of those after it."""

    def begun(self, what: str) -> None:
        """Reports to the watchdog that the next reduction has started. Called equally often on every rank."""

    def waits(self, what: str) -> None:
        """Reports to the watchdog that nothing in flight makes progress; the deadline runs until `progressed`."""

    def progressed(self) -> None:
        """Reports to the watchdog that something made progress, or that nothing is in flight."""

    def close(self) -> None:
        """Frees the message space and the memory. Collective. Tensors of `share` must not be used afterwards."""


# Messages between the ranks of a group that choose their tags, and may receive from any rank.


@runtime_checkable
class PeerMessages(Protocol):
    """One rank's handle on a separate message space of one group. Any thread may use it. Not collective.

    Buffers are contiguous one-dimensional uint8 tensors in host memory, of any length. Ranks are those of
    the group. Tags are from 0 to 32,767. Raises CommunicationError when the library reports a failure.
    """

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        """Starts sending `buffer`, shape (n,); returns a handle. The buffer must not change until it is finished."""

    def receive(self, buffer: torch.Tensor, *, source: int | None, tag: int) -> Pending:
        """Starts receiving into `buffer`, shape (n,), with n of the sender; returns a handle.

        source: None: any rank. Messages with equal source and tag arrive in order. A message of another length is an
        error of `finished` and `wait` on this rank. Longer ones that do not fit into MPI's own buffers may end the
        process instead (Open MPI 4.1 within a node).
        """

    def finished(self, pending: Pending) -> bool:
        """Returns True if the operation is finished. Does not wait; lets the library make progress.

        Raises CommunicationError if it has failed: each time that it is called.
        """

    def wait(self, pending: Pending, *, what: str) -> None:
        """Waits until the operation is finished; raises what `finished` raises. what: for messages of the watchdog."""

    def source_of(self, pending: Pending) -> int:
        """Returns the rank that sent what a finished operation has received."""

    def close(self) -> None:
        """Frees the message space, when all operations are finished. Collective, but does not wait for other ranks."""


# Waiting for something that makes progress only while it is looked at.


_SPIN_S = 1e-3
_SLEEP_S = 20e-6


def poll_until(done: Callable[[], bool]) -> None:
    """Returns when `done()` returns True. Calls it without a pause for a millisecond, then every 20 microseconds."""
    spin_until = time.perf_counter() + _SPIN_S
    while not done():
        if time.perf_counter() < spin_until:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)
