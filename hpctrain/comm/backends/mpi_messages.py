"""How hpctrain sends MPI messages: the pieces that long messages are split into, rings, and `PeerMessages` over MPI.

The modules of the MPI backend pass the communicators; nothing here imports mpi4py.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm.interface.buffer_checks import offsets_of
from hpctrain.comm.interface.transport import Pending, poll_until
from hpctrain.errors import CommunicationError

# Messages are split for two reasons: MPI counts bytes in 32 bits, and between nodes smaller messages are faster (ADR
# 60).

# Less than 2^31 - 1, and no length that a tensor is likely to have: if sender and receiver have buffers of different
# lengths, the sender's ends with a shorter piece, from which the receiver notices the difference.
MOST_BYTES = (1 << 30) - 4096 - 64

# Below Open MPI's eager limit over TCP, 64 KiB with its header.
_EAGER_BYTES = 56 << 10
# Host interfaces by which MPI sends without TCP.
_FABRICS = ("infiniband", "cxi")


def piece_bytes(mpi: Any, comm: Any) -> int | None:
    """Returns the largest message to send between the ranks of `comm`, in bytes. Collective over `comm`.

    Returns None if only the limit `MOST_BYTES` applies: all ranks are on one node, or a rank has a fabric other than
    TCP. MPI sends a message above its eager limit only after the receiver has answered. Over TCP that answer waits
    behind all bytes that the receiver itself is still sending; within a node, and on other fabrics, it takes
    microseconds.

    mpi: the module mpi4py.MPI.
    """
    host = zlib.crc32(socket.gethostname().encode())
    found = np.array([host, -host, _has_fabric()], dtype=np.int64)
    comm.Allreduce(mpi.IN_PLACE, found, op=mpi.MAX)
    highest, negated_lowest, has_fabric = found.tolist()
    return None if has_fabric or highest == -negated_lowest else _EAGER_BYTES


def pieces(num_elems: int, *, most: int | None) -> Iterator[slice]:
    """Yields consecutive slices that cover `num_elems` elements, with at most `most` elements each.

    most: largest number of elements in a slice; None for no limit.
    """
    most = most or max(1, num_elems)
    for begin in range(0, num_elems, most):
        yield slice(begin, min(begin + most, num_elems))


@functools.cache
def _has_fabric() -> bool:
    return any(any(Path("/sys/class", name).glob("*")) for name in _FABRICS)


Array = np.ndarray[Any, Any]

_TAG = 2
_PIECE_BYTES = 1 << 18  # if `piece_bytes` sets no limit
_AHEAD_BYTES = 1 << 21  # that are sent before any piece has arrived


@final
class MessageRing:
    """A ring over the ranks of a communicator, in which each rank sends only to the next rank.

    All methods are collective. Of consecutive ranks on a node, only one sends to another node. Each element therefore
    leaves a node once, and several ranks never send over one link at the same time. A rank passes on each piece as
    soon as the piece has arrived.

    comm: mpi4py communicator of more than one rank.
    piece_bytes: largest message in bytes. None means 256 KiB: a ring needs pieces to pass on.

    Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """

    def __init__(self, comm: Any, *, piece_bytes: int | None) -> None:
        self._comm = comm
        self._piece_bytes = piece_bytes or _PIECE_BYTES
        self._ahead = max(2, _AHEAD_BYTES // self._piece_bytes)
        self._rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        self._next, self._previous = (self._rank + 1) % self._num_ranks, (self._rank - 1) % self._num_ranks

    def gather(self, whole: Array, *, counts: Sequence[int]) -> None:
        """Fills `whole`, shape (sum(counts),), with the parts of all ranks.

        This rank's part must already be in its place in `whole`. Each rank sends all parts to the next rank, except
        the next rank's own part.
        """
        arriving = list(self._slices(self._before(self._rank), counts=counts, itemsize=whole.itemsize))
        receiving = [self._receive(whole[piece]) for _, piece in arriving]
        own = self._slices([self._rank], counts=counts, itemsize=whole.itemsize)
        queue = _SendQueue(self._send, [whole[piece] for _, piece in own], ahead=self._ahead)
        for (owner, piece), request in zip(arriving, receiving, strict=True):
            poll_until(request.Test)
            queue.advance(whole[piece] if owner != self._next else None)
        queue.finish()

    def reduce_scatter(self, values: Array, *, counts: Sequence[int]) -> Array:
        """Returns this rank's slice of the sum of `values` over the ranks, shape (counts[rank],).

        values: array of shape (sum(counts),), which is not changed.

        Slice r is summed in ring order, starting at rank r + 1. Each rank sends all slices except its own. Each rank
        needs additional memory for all slices except that of the previous rank.
        """
        arriving = list(self._slices(self._before(self._previous), counts=counts, itemsize=values.itemsize))
        partial = _room_for([piece for _, piece in arriving], dtype=values.dtype)
        receiving = [self._receive(array) for array in partial]
        first = self._slices([self._previous], counts=counts, itemsize=values.itemsize)
        queue = _SendQueue(self._send, [values[piece] for _, piece in first], ahead=self._ahead)
        total = np.empty(counts[self._rank], values.dtype)
        begin = offsets_of(counts)[self._rank]
        for (owner, piece), array, request in zip(arriving, partial, receiving, strict=True):
            poll_until(request.Test)
            if owner == self._rank:
                _add(array, values[piece], out=total[piece.start - begin : piece.stop - begin])
                queue.advance(None)
            else:
                _add(array, values[piece], out=array)
                queue.advance(array)
        queue.finish()
        return total

    def sum_of_two(self, values: Array) -> None:
        """Replaces `values`, shape (n,), by their sum over the two ranks.

        Each rank sends all of its values to the other rank. These are as many bytes as `reduce_scatter` followed by
        `gather` would send, but in one step.
        """
        own = [piece for _, piece in self._slices([0], counts=[len(values)], itemsize=values.itemsize)]
        arriving = _room_for(own, dtype=values.dtype)
        receiving = [self._receive(array) for array in arriving]
        queue = _SendQueue(self._send, [values[piece] for piece in own], ahead=self._ahead)
        for number, (piece, array) in enumerate(zip(own, arriving, strict=True)):
            poll_until(receiving[number].Test)
            queue.advance(None)
            queue.wait_for(number)
            _add(values[piece], array, out=values[piece])

    def _before(self, rank: int) -> list[int]:
        """Returns the other ranks in the order in which their slices arrive: the predecessor of `rank` first."""
        return [(rank - step) % self._num_ranks for step in range(1, self._num_ranks)]

    def _slices(
        self, owners: Sequence[int], *, counts: Sequence[int], itemsize: int
    ) -> Iterator[tuple[int, slice]]:
        """Splits the ranks' slices of an array into messages; yields (owner, piece).

        owners: ranks whose slices are split, in this order.
        counts: number of elements in each rank's slice.

        `piece` is the range of elements of one message, as a slice object for the whole array.
        """
        offsets = offsets_of(counts)
        for owner in owners:
            for piece in pieces(counts[owner], most=max(1, self._piece_bytes // itemsize)):
                yield owner, slice(offsets[owner] + piece.start, offsets[owner] + piece.stop)

    def _send(self, array: Array) -> Any:
        return self._comm.Isend(array, self._next, _TAG)

    def _receive(self, array: Array) -> Any:
        return self._comm.Irecv(array, self._previous, _TAG)


def _add(a: Array, b: Array, *, out: Array) -> None:
    """Adds two arrays without NumPy's overflow warnings. Gradients may overflow; the loss scale handles that case."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(a, b, out=out)


def _room_for(slices: Sequence[slice], *, dtype: Any) -> list[Array]:
    """Returns one array for each slice, all in one allocation.

    A large allocation is returned to the system when it is freed.
    """
    ends = list(accumulate(piece.stop - piece.start for piece in slices))
    return np.split(np.empty(ends[-1] if ends else 0, dtype), ends[:-1])[: len(ends)]


@final
class _SendQueue:
    """Sends pieces in order: the first `ahead` pieces at once, then one piece for each piece that arrives.

    Links are equally fast in both directions, so pieces leave as fast as pieces arrive. MPI copies messages below its
    eager limit when they are sent, and never frees the memory of the copies; the queue limits that memory.
    """

    def __init__(self, send: Callable[[Array], Any], arrays: Sequence[Array], *, ahead: int) -> None:
        self._send = send
        self._sent = [send(array) for array in arrays[:ahead]]
        self._waiting = deque(arrays[ahead:])

    def advance(self, array: Array | None) -> None:
        """Records that a piece has arrived, and sends the next piece of the queue.

        array: piece to append to the queue first; None to append nothing.
        """
        if array is not None:
            self._waiting.append(array)
        if self._waiting:
            self._sent.append(self._send(self._waiting.popleft()))

    def wait_for(self, number: int) -> None:
        """Waits until MPI has finished sending the piece with the index `number`, counted from 0."""
        poll_until(self._sent[number].Test)

    def finish(self) -> None:
        """Sends the remaining pieces, and waits until MPI has finished sending all of them."""
        self._sent += map(self._send, self._waiting)
        for request in self._sent:
            poll_until(request.Test)


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@final
class _Operation:
    """A buffer that is being sent or received.

    posted: the pieces that MPI has been given so far, in order, each with its request.
    unposted: the remaining pieces, in order, which MPI has not been given yet.
    num_ended: number of posted pieces whose requests have ended.
    error: the failure of the operation; None if it has not failed. The error is kept here because MPI reports a failure
    only once and treats the request as finished afterwards.
    source: group rank that sent the received message; -1 before a message has arrived.
    """

    def __init__(self, buffer: Bytes, *, peer: int, tag: int, receives: bool, most_bytes: int) -> None:
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
    """`PeerMessages` over a separate MPI communicator.

    MPI counts the bytes of a message in 32 bits, so a longer buffer is sent as several messages, called pieces. The
    pieces arrive in the order in which they were sent, since all have the same sender, tag and communicator. Sender and
    receiver cut their buffers at multiples of the same length, so that they need not exchange lengths first.

    A long receive posts its next piece only when the previous piece has arrived. Only then is it known whether the
    sender's buffer has another piece and, for a receive from any rank, which rank the sender is. Later receives with
    the same tag could take pieces of that message, so they are posted only after the last piece of the message.
    """

    def __init__(self, mpi: Any, comm: Any, *, most_bytes: int = MOST_BYTES) -> None:
        """Creates the message space.

        mpi: the module mpi4py.MPI.
        comm: communicator of the group, used by this object only.
        most_bytes: largest MPI message in bytes.
        """
        self._mpi = mpi
        self._comm = comm
        self._most_bytes = most_bytes
        # Pieces of two buffers must not mix, whichever threads send and receive them.
        self._posting = threading.RLock()
        # By tag, receives with pieces that are not posted yet: the later ones wait for the first.
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
        """Posts as many as possible of the receives with this tag that were held back.

        A receive is held back until all pieces of the messages before it have been posted.
        """
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
        """Posts the next piece of a receive, or all pieces of a send."""
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
        """Tests the oldest piece of `operation` that MPI is still sending or receiving.

        Returns True if MPI has finished this piece, or if there is no such piece. A failure is stored in
        `operation.error`.
        """
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
            f"rank {status.Get_source()} with tag {status.Get_tag()}: send and receive tensors of the same size and "
            "dtype"
        )

    def wait(self, pending: Pending, *, what: str) -> None:
        poll_until(lambda: self.finished(pending))

    def source_of(self, pending: Pending) -> int:
        return int(pending.source)

    def close(self) -> None:
        self._comm.Free()
