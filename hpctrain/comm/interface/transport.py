"""Point-to-point messages and memory shared within a node, for code that schedules its own communication.

The collective operations of a backend block until they are done. A reduction that keeps the network, the node's memory
and the conversions busy at the same time needs operations that it can start and poll. `Transport` has such operations.
`PeerMessages` is for messages within a group of ranks: the caller chooses the tags, and may receive from any rank.
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
    """One rank's access to messages between all ranks, and to memory shared within its node.

    The messages have a separate message space. A transport is used by one thread at a time. Buffers are contiguous
    one-dimensional uint8 tensors in host memory. Every method raises CommunicationError if the library reports a
    failure.
    """

    @property
    def rank(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        """Starts sending `buffer`, shape (n,), and returns a handle.

        The buffer must not change until `all_done` reports the handle as finished.
        """

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Pending:
        """Starts receiving into `buffer`, shape (n,), and returns a handle. The sender must send n bytes.

        Messages with the same source and tag arrive in the order in which they were sent.
        """

    def all_done(self, pending: Sequence[Pending]) -> bool:
        """Returns True if all these operations are finished. Does not wait, but lets the library make progress."""

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        """Allocates memory that all ranks of this node share. Collective over the ranks of the node.

        Args:
            num_bytes: Size of this rank's segment.

        Returns:
            The segments of all ranks of the node, by local rank, filled with zeros.

        Raises:
            CommunicationError: On every rank of the node. The node lacks the memory (/dev/shm is too small, for
                example).
        """

    def fence(self) -> None:
        """Orders this rank's accesses to shared memory: those before the call take effect before those after it."""

    def begun(self, what: str) -> None:
        """Tells the watchdog that the next reduction, named `what`, has started.

        Every rank must call this method the same number of times.
        """

    def waits(self, what: str) -> None:
        """Tells the watchdog that no operation in flight makes progress. `what` says in messages what is waited for.

        The time from now until `progressed` is called counts against the deadline.
        """

    def progressed(self) -> None:
        """Tells the watchdog that an operation has made progress, or that no operation is in flight."""

    def close(self) -> None:
        """Frees the message space and the shared memory. Collective.

        The tensors that `share` has returned must not be used afterwards.
        """


@runtime_checkable
class PeerMessages(Protocol):
    """One rank's access to messages between the ranks of one group, in a separate message space.

    Any thread may use the object. Its operations are not collective, except `close`. Buffers are contiguous
    one-dimensional uint8 tensors in host memory, of any length. Ranks are group ranks. Tags are from 0 to
    `NUM_TAGS` - 1 (32,767). Every method raises CommunicationError if the library reports a failure.
    """

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        """Starts sending `buffer`, shape (n,), and returns a handle.

        The buffer must not change until the send is finished.
        """

    def receive(self, buffer: torch.Tensor, *, source: int | None, tag: int) -> Pending:
        """Starts receiving into `buffer`, shape (n,), and returns a handle.

        Messages with the same source and tag arrive in the order in which they were sent. If the length of the message
        is not n, `finished` and `wait` raise CommunicationError on this rank. A message that is longer than n and does
        not fit into MPI's own buffers may end the process instead (Open MPI 4.1 within a node).

        Args:
            buffer: Tensor as long as the sender's.
            source: Rank of the sender; None means any rank.
            tag: Tag of the message.
        """

    def finished(self, pending: Pending) -> bool:
        """Returns True if the operation is finished. Does not wait, but lets the library make progress.

        Once the operation has failed, every call raises CommunicationError.
        """

    def wait(self, pending: Pending, *, what: str) -> None:
        """Waits until the operation is finished. Raises CommunicationError if it has failed.

        what: name of the operation, for messages of the watchdog.
        """

    def source_of(self, pending: Pending) -> int:
        """Returns the rank that sent the message of a finished receive."""

    def close(self) -> None:
        """Frees the message space once all operations are finished. Collective, but does not wait for other ranks."""


_SPIN_S = 1e-3
_SLEEP_S = 20e-6


def poll_until(done: Callable[[], bool]) -> None:
    """Calls `done()` until it returns True: for a millisecond without a pause, then every 20 microseconds.

    Use it for operations that make progress only while they are polled.
    """
    spin_until = time.perf_counter() + _SPIN_S
    while not done():
        if time.perf_counter() < spin_until:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)
