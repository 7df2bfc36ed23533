"""`PeerMessages` over MPI. `hpctrain.comm.backends.mpi_world` passes the communicator.

MPI counts the bytes of a message in 32 bits. A longer buffer is sent as several messages, its pieces, which arrive in
the order in which they were sent, since all have the same sender, tag and communicator. Sender and receiver each cut
their buffers at multiples of the same length, so that they need not exchange anything before.

A long receive posts its next piece when the one before has arrived, for two reasons: only then is it known whether
the sender's buffer has another piece, and, of a receive from any rank, who the sender is. Later receives with the same
tag could take pieces of its message. Therefore they are posted after its last piece.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm.backends.mpi_messages.pieces import MOST_BYTES, pieces
from hpctrain.comm.interface.polling import poll_until
from hpctrain.comm.interface.transport import Pending
from hpctrain.errors import CommunicationError

Array = np.ndarray[Any, np.dtype[np.uint8]]


@final
class _Operation:
    """A buffer that is being sent or received.

    posted: the pieces given to MPI so far, in order, with their requests. unposted: the pieces that follow.
    num_ended: how many of those posted have ended. error: how it failed. MPI reports that once only: a request that has
    ended counts as finished afterwards. source: the rank whose message was received.
    """

    def __init__(self, buffer: Array, *, peer: int, tag: int, receives: bool, most_bytes: int) -> None:
        self.buffer = buffer  # kept alive as long as MPI uses it
        # An empty buffer is one empty message.
        self.unposted = deque(pieces(len(buffer), most=most_bytes)) or deque([slice(0, 0)])
        self.posted: list[tuple[slice, Any]] = []
        self.num_ended = 0
        self.peer = peer
        self.tag = tag
        self.receives = receives
        self.error: CommunicationError | None = None
        self.source = -1

    @property
    def finished(self) -> bool:
        return not self.unposted and self.num_ended == len(self.posted)


@final
class MpiMessages:
    """`PeerMessages` over a separate MPI communicator."""

    def __init__(self, mpi: Any, comm: Any, *, most_bytes: int = MOST_BYTES) -> None:
        """mpi: the module mpi4py.MPI. comm: of the group, used by this object only. most_bytes: of an MPI message."""
        self._mpi = mpi
        self._comm = comm
        self._most_bytes = most_bytes
        # Pieces of two buffers must not mix, whichever threads send and receive them.
        self._posting = threading.RLock()
        # By tag, receives of which pieces are unposted: the others wait for the first one.
        self._held_back: dict[int, deque[_Operation]] = {}

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            rank = self._comm.Get_rank()
            raise CommunicationError(
                f"{operation} on rank {rank} of the group: MPI reported {error}"
            ) from error

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        operation = _Operation(buffer.numpy(), peer=to, tag=tag, receives=False, most_bytes=self._most_bytes)
        with self._reported(f"send to rank {to}"), self._posting:
            self._post(operation)
        return operation

    def receive(self, buffer: torch.Tensor, *, source: int | None, tag: int) -> Pending:
        peer = self._mpi.ANY_SOURCE if source is None else source
        operation = _Operation(buffer.numpy(), peer=peer, tag=tag, receives=True, most_bytes=self._most_bytes)
        with self._reported(f"receive from rank {'any' if source is None else source}"), self._posting:
            self._held_back.setdefault(tag, deque()).append(operation)
            self._advance(tag)
        return operation

    def _advance(self, tag: int) -> None:
        """Posts the receives that were held back, as far as that is possible now."""
        waiting = self._held_back[tag]
        while waiting:
            first = waiting[0]
            while first.unposted and first.error is None:
                if not self._test_piece(first):
                    return
                if first.error is None:
                    self._post(first)
            waiting.popleft()

    def _post(self, operation: _Operation) -> None:
        """Posts the next piece; of a buffer that is sent, all."""
        while operation.unposted:
            piece = operation.unposted.popleft()
            message = [operation.buffer[piece], self._mpi.BYTE]
            if operation.receives:
                request = self._comm.Irecv(message, operation.peer, operation.tag)
            else:
                request = self._comm.Isend(message, operation.peer, operation.tag)
            operation.posted.append((piece, request))
            if operation.receives:
                return

    def finished(self, pending: Pending) -> bool:
        operation: _Operation = pending
        with self._reported("messages"), self._posting:
            if operation.receives and operation.tag in self._held_back:
                self._advance(operation.tag)
            while operation.error is None and operation.num_ended < len(operation.posted):
                if not self._test_piece(operation):
                    return False
        if operation.error is not None:
            raise operation.error
        return operation.finished

    def _test_piece(self, operation: _Operation) -> bool:
        """Returns True if the oldest piece that has not ended has now; keeps its error in the operation."""
        if operation.num_ended == len(operation.posted):
            return True
        piece, request = operation.posted[operation.num_ended]
        try:
            if not self._test(operation, request, expected=piece.stop - piece.start):
                return False
            operation.num_ended += 1
        except CommunicationError as error:
            operation.error = error
        return True

    def _test(self, operation: _Operation, request: Any, *, expected: int) -> bool:
        status = self._mpi.Status()
        whole = len(operation.buffer)
        try:
            with self._reported("messages"):
                if not request.Test(status):
                    return False
        except CommunicationError as error:
            cause = error.__cause__
            if operation.receives and cause.Get_error_class() == self._mpi.ERR_TRUNCATE:  # type: ignore[union-attr]
                raise self._other_length(f"more than the {whole} bytes", status) from cause
            raise
        if not operation.receives:
            return True
        operation.source = operation.peer = status.Get_source()
        found = status.Get_count(self._mpi.BYTE)
        if found != expected:
            before = operation.posted[operation.num_ended][0].start
            raise self._other_length(f"{before + found} bytes instead of the {whole}", status)
        return True

    def _other_length(self, found: str, status: Any) -> CommunicationError:
        return CommunicationError(
            f"rank {self._comm.Get_rank()} of the group has received a message of {found} that its tensor has, from "
            f"rank {status.Get_source()} with tag {status.Get_tag()}: send and receive tensors of one size and dtype"
        )

    def wait(self, pending: Pending, *, what: str) -> None:
        poll_until(lambda: self.finished(pending))

    def source_of(self, pending: Pending) -> int:
        return int(pending.source)

    def close(self) -> None:
        self._comm.Free()
