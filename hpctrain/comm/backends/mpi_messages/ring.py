"""All-gather, reduce-scatter and sums of MPI messages in a ring. `hpctrain.comm.backends.mpi_group` passes the
communicator.

Each rank sends to the next one only. Of ranks that follow each other on a node one sends to another node, so that each
element leaves a node once, and no link has to take what several ranks send at the same time. A rank passes on each
piece as soon as it has arrived.

Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, final

import numpy as np

from hpctrain.comm.backends.mpi_messages.pieces import pieces
from hpctrain.comm.interface.buffer_checks import offsets_of
from hpctrain.comm.interface.polling import poll_until

Array = np.ndarray[Any, Any]

_TAG = 2
_PIECE_BYTES = 1 << 18  # if `piece_bytes` sets no limit
_AHEAD_BYTES = 1 << 21  # that are sent before any piece has arrived


@final
class MessageRing:
    """The ranks of `comm`, of mpi4py, more than one, each of which sends to the next.

    piece_bytes: the most of a message; None: 256 KiB, so that pieces can be passed on. All methods are collective.
    """

    def __init__(self, comm: Any, *, piece_bytes: int | None) -> None:
        self._comm = comm
        self._piece_bytes = piece_bytes or _PIECE_BYTES
        self._ahead = max(2, _AHEAD_BYTES // self._piece_bytes)
        self._rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        self._next, self._previous = (self._rank + 1) % self._num_ranks, (self._rank - 1) % self._num_ranks

    def gather(self, whole: Array, *, counts: Sequence[int]) -> None:
        """Fills `whole`, shape (sum(counts),), with the parts of all ranks; this rank's must be in its place.

        Bytes sent: all parts but that of the next rank.
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
        """Returns the sum over the ranks of this rank's slice of `values`, shape (counts[rank],).

        values: shape (sum(counts),), not changed. The values of slice r are added up from rank r + 1 on. Bytes sent:
        all slices but the own one. Memory: of all slices but that of the rank before.
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

        Each sends all of its values: as many bytes as by `reduce_scatter` and `gather`, in one step.
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
        """Returns the ranks before `rank`, the next one first: whose slices arrive one after another."""
        return [(rank - step) % self._num_ranks for step in range(1, self._num_ranks)]

    def _slices(
        self, owners: Sequence[int], *, counts: Sequence[int], itemsize: int
    ) -> Iterator[tuple[int, slice]]:
        """Yields each owner's slice of the whole, in pieces."""
        offsets = offsets_of(counts)
        for owner in owners:
            for piece in pieces(counts[owner], most=max(1, self._piece_bytes // itemsize)):
                yield owner, slice(offsets[owner] + piece.start, offsets[owner] + piece.stop)

    def _send(self, array: Array) -> Any:
        return self._comm.Isend(array, self._next, _TAG)

    def _receive(self, array: Array) -> Any:
        return self._comm.Irecv(array, self._previous, _TAG)


def _add(a: Array, b: Array, *, out: Array) -> None:
    """Adds without NumPy's warnings: gradients may overflow, which the loss scale looks for."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(a, b, out=out)


def _room_for(slices: Sequence[slice], *, dtype: Any) -> list[Array]:
    """Returns an array for each slice, all in one piece of memory, which the system gets back if it is large."""
    ends = list(accumulate(piece.stop - piece.start for piece in slices))
    return np.split(np.empty(ends[-1] if ends else 0, dtype), ends[:-1])[: len(ends)]


@final
class _SendQueue:
    """Pieces to be sent in their order: `ahead` at once, then one for each that arrives, as links are equally fast.

    MPI copies messages below its eager limit when they are sent, and does not give that memory back.
    """

    def __init__(self, send: Callable[[Array], Any], arrays: Sequence[Array], *, ahead: int) -> None:
        self._send = send
        self._sent = [send(array) for array in arrays[:ahead]]
        self._waiting = deque(arrays[ahead:])

    def advance(self, array: Array | None) -> None:
        """Notes that a piece has arrived. array: to be sent after all others."""
        if array is not None:
            self._waiting.append(array)
        if self._waiting:
            self._sent.append(self._send(self._waiting.popleft()))

    def wait_for(self, number: int) -> None:
        """Waits until piece `number`, which has been sent, has left."""
        poll_until(self._sent[number].Test)

    def finish(self) -> None:
        """Sends the rest, and waits until all pieces have left."""
        self._sent += map(self._send, self._waiting)
        for request in self._sent:
            poll_until(request.Test)
