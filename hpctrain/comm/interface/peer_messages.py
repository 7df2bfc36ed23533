"""Messages between the ranks of a group that choose their tags, and may receive from any rank."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from hpctrain.comm.interface.transport import Pending


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
