"""Point-to-point messages and memory shared within a node, for reductions that make their own schedule.

A backend's collective operations block until they are done. A reduction that keeps the network, the node's
memory and the conversions busy at the same time needs operations that it can start and poll.
"""

from __future__ import annotations

from collections.abc import Sequence
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
