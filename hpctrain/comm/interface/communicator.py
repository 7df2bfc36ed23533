"""The interface of a communication backend, values that belong to a communicator, and what every backend's world
shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import PeerMessages, Transport
from hpctrain.topology import Topology

# The interface of a communication backend: Protocols only.
#
# Only the backend's own modules import its library. Everything else is written against these Protocols and
# takes the communicator as an argument.
#
# Buffers are contiguous one-dimensional torch tensors on the backend's device. Every method below is
# collective over the communicator's ranks unless marked as not collective: all ranks call it, in the same
# order. Constructors of the higher layers and properties never communicate.


T = TypeVar("T")


class ReduceOp(Enum):
    """Operation of an all-reduce."""

    SUM = "sum"
    MAX = "max"


@runtime_checkable
class Collective(Protocol):
    """Collective operations over one group of ranks.

    dtypes: float16, float32, float64, int32, int64, uint8. bfloat16 over every backend but Horovod.
    Results are bitwise equal on every rank of the group, and from run to run.
    Raises BufferMismatch for invalid buffers or counts, CommunicationError when the backend reports a failure.
    """

    @property
    def backend(self) -> str:
        """`horovod`, `mpi`, `threads` or `serial`."""

    @property
    def rank(self) -> int:
        """This rank's index in the group, from 0."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def members(self) -> tuple[int, ...]:
        """World rank of each rank of the group."""

    def attribute(self, kind: type[T]) -> T:
        """Returns this communicator's instance of `kind`, which is created with `kind()` by the first call.

        What a caller must remember of a communicator lives as long as it does. Not collective.
        """

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduces `buffer`, shape (n,), over the ranks, in place; n may be 0.

        float16 is summed in float32 and rounded once where the backend allows it (mpi, threads); Horovod
        sums float16 in float16.
        """

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        """Starts summing `buffer`, shape (n,), over the ranks, in place; returns a function that waits for the end.

        Collective. Every rank must call the returned function, in any order, and not use the buffer before. At most
        16 sums may be in flight, each with its own `number`, the same on every rank. Horovod caches by that number
        what the ranks negotiated: pass the same one each time for the same buffer. Backends without asynchronous
        operations finish the sum before they return.
        """

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        """Sums `buffer`, shape (sum(counts),), and returns this rank's slice, shape (counts[rank],).

        `counts` is the same on every rank; an entry may be 0. The contents of `buffer` are unspecified
        afterwards.
        """

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the ranks' `part`s, each shape (counts[rank],), concatenated: shape (sum(counts),).

        out: a tensor of that shape which is filled and returned, instead of a new one; `part` may be this rank's slice
        of it, but not overlap it otherwise.
        """

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Sends each rank its slice of `buffer`; returns the slices sent to this rank, in rank order.

        buffer: shape (sum(send_counts),), unchanged; slice r is sent to rank r. Returns shape
        (sum(receive_counts),). The counts may differ between ranks, but for every pair of ranks a's
        `receive_counts[b]` must equal b's `send_counts[a]`; entries may be 0.
        """

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        """Copies `buffer`, shape (n,), of the group's rank `root` into that of every other rank."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data`, in rank order. Lengths may differ and may be 0."""

    def barrier(self) -> None: ...

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        """Returns an object for collective reading and writing of files; None if the backend has none.

        Collective over this communicator. members: world ranks of the subgroup that this rank belongs to, in group
        order, where each subgroup has its own files; None: all ranks of this communicator.
        """

    def close(self) -> None:
        """Frees the communicator, which must not be used afterwards. Collective, but does not wait for other ranks,
        except of a world. A communicator that is not closed stays until the process ends."""


@runtime_checkable
class World(Collective, Protocol):
    """The group of all ranks: the only one that makes other groups and can end the run."""

    @property
    def reduction_backend(self) -> str:
        """Name of the backend of `open_reduction_world`: `horovod` where the run asked for it, else `backend`."""

    def open_reduction_world(self) -> World:
        """Returns a world of the same ranks over `reduction_backend`, with a separate message space. Collective.

        For reductions by that library's own operations. Close it when they are done: Horovod's thread takes CPU time
        from training, and runs only while such a world is open.
        """

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        """Makes one communicator per group of world ranks; returns this rank's, or None if it is in no group.

        Collective over the world. `groups` must be the same on every rank. Raises BufferMismatch unless the groups are
        disjoint and not empty.
        """

    def duplicate(self) -> Collective:
        """Returns a communicator of the same ranks with a separate message space, for another thread. Collective."""

    def open_group(self, members: Sequence[int]) -> tuple[Collective, PeerMessages | None] | None:
        """Returns a communicator of the world ranks `members`, and messages between them; None if the backend has none.

        Collective over `members` only, which must be in the same order on each of them; this rank is one of them. The
        messages are None for a group of one rank. Close both when they are done.
        """

    def transport(self, topology: Topology) -> Transport | None:
        """Returns point-to-point messages and node-shared memory over the same ranks; None if the backend has none.

        Collective. topology: defines which ranks share memory.
        """

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        """Returns memory that all ranks can read, of which `num_bytes` belong to this rank; None if the backend has
        none. Collective. Sizes may differ between ranks and may be 0.
        """

    def abort(self, exit_code: int) -> None:
        """Ends every rank of the run at once with `exit_code`. Not collective; does not return."""

    def close(self) -> None:
        """Finishes communication. Collective. The communicator must not be used afterwards."""


# Values that belong to a communicator and live as long as it does: attribute caching, as in MPI 4.0,
# section 7.7.


class Attributes:
    """Base class of communicators: see `Collective.attribute`."""

    def attribute(self, kind: type[T]) -> T:
        found: dict[type, Any] = self.__dict__.setdefault("_attributes", {})
        if kind not in found:
            found[kind] = kind()
        value: T = found[kind]
        return value


# A world's collective operations, forwarded to its group of all ranks. Shared by all backends.


class Forwarding(Attributes):
    """Base class: forwards collective operations to `_group`, which the subclass's constructor sets."""

    _group: Collective

    @property
    def backend(self) -> str:
        return self._group.backend

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        return self._group.num_ranks

    @property
    def members(self) -> tuple[int, ...]:
        return self._group.members

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        self._group.all_reduce(buffer, op=op)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        return self._group.start_all_reduce(buffer, number=number)

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        return self._group.reduce_scatter(buffer, counts=counts)

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._group.all_gather(part, counts=counts, out=out)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        return self._group.all_to_all(buffer, send_counts=send_counts, receive_counts=receive_counts)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        self._group.broadcast(buffer, root=root)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._group.all_gather_bytes(data)

    def barrier(self) -> None:
        self._group.barrier()

    def open_group(self, members: Sequence[int]) -> tuple[Collective, PeerMessages | None] | None:
        """Returns None: see `World.open_group`. A backend that has such groups overrides it."""
        return None

    def close(self) -> None:
        self._group.close()

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        return self._group.collective_files(members=members)
