"""Runs the operations of one process set in order, and checks before each that all ranks call the same operation.

The check is one all-reduce of 32 bytes. The check also finds ranks that have called `join`. These ranks contribute
zeros to the reductions of the other ranks until all ranks have joined.
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
from hpctrain.hvd.reductions import HorovodOp, reduce_flat

# The contribution of a joined rank to the comparison; less than the number of any operation.
_NO_OPERATION = -(1 << 62)


@final
class Group:
    """The ranks of a process set and the thread that runs their operations.

    All methods are collective over these ranks.

    Args:
        comm: The communicator of these ranks. Only this object uses it. The communicator's own comparison of arguments
            between the ranks must be switched off.
        name: The name of the group, for messages.
        sums: A function that sums a tensor of shape (n,) over the ranks in place, used instead of `comm.all_reduce`.
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
        self._number = 0  # number of operations started, the same on every rank
        self._number_at_join = 0
        self._join: CollectiveWork | None = None  # a join that has not ended

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def place_of(self, rank: int) -> int:
        """Returns the index of world rank `rank` in the group. Raises ValueError if the rank is not a member."""
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
        """Runs `operation` after the operations that were started before it.

        If the previous operation failed on all ranks, as when ranks called different operations, and the caller has not
        waited for it, this operation fails at once with the same error. Otherwise this operation could wait forever: a
        rank that got the error from a blocking call may never start it.

        Args:
            what: A text with the operation, its name and its shapes. The text must be the same on every rank.
            operation: A function that communicates over `comm`.
            behind: True: `run` returns at once. False: the operation has ended when `run` returns.
            zeros: A description of what ranks that have joined contribute, from `reduction_of_zeros`. None: the
                operation fails if a rank has joined.
            named: A text with the operation and the name that the script gave it; None if the script gave no name.

        Returns:
            The handle of the operation, on which the caller waits.

        Raises:
            HorovodInternalError: On every rank, naming what each rank called, if the calls differ. Raised here or by
                `wait` of the work.
            HorovodValueError: If an operation with the same name was started and not waited for.
        """
        if named is not None and self._is_in_use(named):
            raise HorovodValueError(
                f"{named} was started before and has not been waited for: give another name, or first call "
                "hvd.synchronize with the handle of the earlier operation"
            )
        # Decided here and not when the operation runs, so that it does not depend on timing.
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

    def reduce(self, flat: torch.Tensor, *, op: HorovodOp, sizes: Sequence[int]) -> None:
        """Reduces `flat`, shape (sum(sizes),), in place. Call it only inside an operation of `run`."""
        reduce_flat(self.comm, flat, op=op, sizes=sizes, sums=self._sums)

    def start_join(self, *, limited: bool = False) -> None:
        """Starts contributing zeros to the reductions of the other ranks, until all ranks have joined.

        limited: whether the time limit applies while this rank waits for the next operation of the other ranks.
        """
        self._join = self._thread.run(lambda: self._take_part(limited=limited), [], behind=True)

    def end_join(self) -> int:
        """Waits until all ranks have joined.

        Returns the number of operations that this rank had started before it joined.
        """
        if self._join is not None:
            with as_horovod_error():
                self._join.wait()
        self._join = None
        return self._number_at_join

    def close(self) -> None:
        """Waits for the operations and for ranks that still take part in a join, then ends the thread."""
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
        """Runs an operation after the check that all ranks call it.

        `before` is the previous operation if the caller had not waited for it, otherwise None.
        """
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
                        f"{what}: rank {self.comm.members[joined]} has called join, and until all ranks have, the "
                        "others can run only sums, averages and Adasum of dense tensors",
                        agreed=True,
                    )
            operation()

    def _meet(self, what: str | None) -> tuple[int, int]:
        """Compares the operations of all ranks. Raises BufferMismatch on every rank if they differ.

        Returns the lowest rank that has not joined, and the highest rank that has joined; -1 if there is no such rank.
        `what` is this rank's operation, or None if this rank has joined.
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
            self.reduce(flat, op=HorovodOp(zeros["op"]), sizes=sizes)


def join_all(groups: Sequence[Group]) -> int:
    """Joins in several groups of the same ranks at once. Returns the world rank that joined last. Collective.

    The rank that had started the most operations counts as the last; of several such ranks, the highest rank.
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
    """An operation that was started. `synchronize(handle)`, or calling the handle, waits for its result."""

    def __init__(self, work: CollectiveWork, result: Callable[[], Any]) -> None:
        self.work = work
        self._result = result

    def __call__(self) -> Any:
        with as_horovod_error():
            self.work.wait()
        return self._result()

    def done(self) -> bool:
        """Returns True if the operation has ended, with or without an error."""
        return self.work.is_completed()


def poll(handle: Handle) -> bool:
    """Returns True if `synchronize(handle)` would return at once. Not collective."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits until an operation has ended. Not collective.

    Args:
        handle: The handle of the operation.

    Returns:
        The resulting tensor; for a grouped operation a list of tensors.

    Raises:
        HorovodInternalError: If the operation failed.
    """
    return handle()


def titled(operation: str, name: str | None) -> str:
    """Returns the operation and its name, if any, as text for messages and for the comparison between ranks.

    Operations without a name get no numbered default name: a rank that has joined would number them differently.
    """
    return operation if name is None else f"{operation} {name!r}"


def dtype_name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def reduction_of_zeros(op: HorovodOp, buffers: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """Returns what a joined rank must know to contribute zeros, as JSON: the operation and the sizes of the buffers.

    buffers: for each buffer, its dtype and the number of elements of each tensor in it.
    """
    return {"op": int(op), "buffers": [[dtype, list(sizes)] for dtype, sizes in buffers]}
