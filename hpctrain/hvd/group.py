"""The operations of one process set: one after another, each preceded by a comparison of what the ranks call.

The comparison is one all-reduce of 32 bytes. It also finds ranks that have joined: they take part in the sums of the
others with zeros until all ranks have joined.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from hpctrain.comm import (
    Collective,
    ReduceOp as CollectiveOp,
    broadcast_json,
    check_same,
    doing,
    without_limit,
)
from hpctrain.distributed import CollectiveWork, OperationThread
from hpctrain.errors import BufferMismatch, CommunicationError, HpctrainError
from hpctrain.hvd.errors import HorovodInternalError, HorovodValueError, as_horovod_error
from hpctrain.hvd.reductions import ReduceOp, reduce_flat

# Less than the number of any operation: what a rank that has joined contributes to the comparison.
_NO_OPERATION = -(1 << 62)


@final
class Group:
    """The ranks of a process set. All methods but properties are collective over them.

    comm: of these ranks, used by this object only, and without comparisons of its own. sums: sums a tensor of shape
    (n,) over the ranks in place, instead of `comm.all_reduce`.
    """

    def __init__(
        self, comm: Collective, *, name: str, sums: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self.comm = comm
        self._name = name
        self._sums = sums
        self._thread = OperationThread(f"hpctrain-hvd-{name}")
        self._unseen: deque[tuple[str | None, CollectiveWork]] = (
            deque()
        )  # names of started operations, see `run`
        self._number = 0  # of operations that have begun, the same on every rank
        self._number_at_join = 0
        self._join: CollectiveWork | None = None  # that was started and not ended

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def place_of(self, rank: int) -> int:
        """Returns the place of world rank `rank` in the group. Raises ValueError if it is not a member."""
        return self.comm.members.index(rank)

    def run(
        self,
        what: str,
        operation: Callable[[], None],
        *,
        behind: bool,
        zeros: dict[str, Any] | None = None,
        named: str | None = None,
    ) -> CollectiveWork:
        """Runs `operation` after those that were started before, and returns its work.

        what: operation, name, shapes, as a text that must be the same on every rank. behind: the caller continues;
        otherwise the operation has ended when this returns. zeros: what ranks that have joined reduce, see
        `reduction_of_zeros`; None: the operation fails when a rank has joined. named: operation and name, if it was
        given one. Raises HorovodInternalError on every rank, with what each one called, if they differ: here, or in the
        work's `wait`. If an operation has failed in this way that was started before and not waited for, this one fails
        with the same error at once: a rank that got the error from a blocking call may not come to this one.
        Raises HorovodValueError if an operation of that name was started, and the caller has not seen yet that it has
        ended, or a later one.
        """
        if named is not None and self._is_in_use(named):
            raise HorovodValueError(
                f"{named} was started before and has not been waited for: give another name, or call "
                "hvd.synchronize with the first one's handle"
            )
        # Decided here and not when the operation runs: whether the caller has waited does not depend on timing.
        before = self._unseen[-1][1] if self._unseen and not self._unseen[-1][1].awaited else None
        try:
            with as_horovod_error():
                work = self._thread.run(
                    lambda: self._carry_out(what, operation, zeros, before=before), [], behind=behind
                )
        finally:
            if not behind:
                self._unseen.clear()
        if behind:
            while self._unseen and self._unseen[0][1].awaited:
                self._unseen.popleft()
            self._unseen.append((named, work))
        return work

    def _is_in_use(self, named: str) -> bool:
        # Whether an operation has ended would differ between the ranks; whether it was waited for does not.
        for name, work in reversed(self._unseen):
            if work.awaited:
                return False
            if name == named:
                return True
        return False

    def reduce(self, flat: torch.Tensor, *, op: ReduceOp, sizes: Sequence[int]) -> None:
        """Reduces `flat`, shape (sum(sizes),), in place. To be called within an operation of `run`."""
        reduce_flat(self.comm, flat, op=op, sizes=sizes, sums=self._sums)

    def start_join(self, *, limited: bool = False) -> None:
        """Starts taking part in the other ranks' sums with zeros, until all ranks have joined.

        limited: whether the time limit applies to the wait for their next operation.
        """
        self._join = self._thread.run(lambda: self._take_part(limited=limited), [], behind=True)

    def end_join(self) -> int:
        """Waits until all ranks have joined; returns how many operations this rank had begun before it joined."""
        if self._join is not None:
            with as_horovod_error():
                self._join.wait()
        self._join = None
        return self._number_at_join

    def close(self) -> None:
        """Ends the group: waits for operations, and for ranks that still take part in a join."""
        if self.num_ranks > 1:
            if self._join is None:
                self.start_join(limited=True)
            with contextlib.suppress(HpctrainError):  # raised where the operation was waited for
                self.end_join()
        self._thread.close()

    def _take_part(self, *, limited: bool) -> None:
        self._number_at_join = self._number
        if self.num_ranks == 1:
            return
        with doing(self.comm, "join"):
            while True:
                self._number += 1
                try:
                    with contextlib.nullcontext() if limited else without_limit(self.comm):
                        active, _ = self._meet(None)
                except BufferMismatch as error:
                    if not error.agreed:
                        raise
                    continue  # the others have called different operations, and know it
                if active < 0:
                    return
                call = broadcast_json(self.comm, None, root=active)
                if call is not None:
                    self._contribute_zeros(call)

    def _carry_out(
        self,
        what: str,
        operation: Callable[[], None],
        zeros: dict[str, Any] | None,
        *,
        before: CollectiveWork | None,
    ) -> None:
        """before: the last operation, if it was not waited for when this one was asked for."""
        if self.num_ranks == 1:
            operation()
            return
        error = None if before is None else before.error
        if isinstance(error, CommunicationError) and error.agreed:
            raise error
        self._number += 1
        with doing(self.comm, what):
            active, joined = self._meet(what)
            if joined >= 0:
                broadcast_json(self.comm, zeros, root=active)
                if zeros is None:
                    raise HorovodInternalError(
                        f"{what}: rank {self.comm.members[joined]} has called join, and without it only sums, "
                        "averages and Adasum of dense tensors are possible",
                        agreed=True,
                    )
            operation()

    def _meet(self, what: str | None) -> tuple[int, int]:
        """Returns the lowest rank that has not joined and the highest that has; -1 where there is none.

        what: this rank's operation; None if it has joined. Raises BufferMismatch on every rank if the operations
        differ.
        """
        if what is None:
            header = torch.tensor([_NO_OPERATION, _NO_OPERATION, 0, 1 + self.rank])
        else:
            number = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=7).digest(), "big")
            header = torch.tensor([number, -number, self.num_ranks - self.rank, 0])
        self.comm.all_reduce(header, op=CollectiveOp.MAX)
        largest, smallest, active, joined = header.tolist()
        if active and largest != -smallest:
            check_same(
                self.comm,
                name=f"operation {self._number} of {self._name}",
                value="join" if what is None else what,
                error=BufferMismatch,
            )
        return self.num_ranks - active if active else -1, joined - 1

    def _contribute_zeros(self, zeros: dict[str, Any]) -> None:
        for dtype, sizes in zeros["buffers"]:
            flat = torch.zeros(sum(sizes), dtype=getattr(torch, dtype))
            self.reduce(flat, op=ReduceOp(zeros["op"]), sizes=sizes)


def join_all(groups: Sequence[Group]) -> int:
    """Joins in groups of the same ranks at once; returns the world rank that joined last. Collective.

    That is the rank that had begun most operations, and of several the highest.
    """
    first = groups[0]
    for group in groups:
        group.start_join()
    begun = sum([group.end_join() for group in groups])
    place = torch.tensor([begun * first.num_ranks + first.rank])
    first.run("join", lambda: first.comm.all_reduce(place, op=CollectiveOp.MAX), behind=False)
    return first.comm.members[int(place) % first.num_ranks]


@final
class Handle:
    """An operation that was started. `synchronize(handle)`, or calling it, waits for its result."""

    def __init__(self, work: CollectiveWork, result: Callable[[], Any]) -> None:
        self.work = work
        self._result = result

    def __call__(self) -> Any:
        with as_horovod_error():
            self.work.wait()
        return self._result()

    def done(self) -> bool:
        """Returns True when the operation has ended, also with an error."""
        return self.work.is_completed()


def poll(handle: Handle) -> bool:
    """Returns True when `synchronize` would not wait. Not collective."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits for an operation and returns its tensor, a list for a group of tensors. Not collective.

    Raises HorovodInternalError if it failed.
    """
    return handle()


def titled(operation: str, name: str | None) -> str:
    """Returns an operation with its name, if it has one, for messages and the comparison of what the ranks call.

    Names are not made up: a rank that has joined would not count with the others.
    """
    return operation if name is None else f"{operation} {name!r}"


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def reduction_of_zeros(op: ReduceOp, buffers: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """Returns as JSON what a rank that has joined reduces: for each buffer its dtype and the sizes of its tensors."""
    return {"op": int(op), "buffers": [[dtype, list(sizes)] for dtype, sizes in buffers]}
