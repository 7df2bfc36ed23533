"""The interface of a communication backend (`Collective`, `World`), and the base classes that all backends share.

Only a backend's own modules import its library. Everything else is written against these Protocols and takes the
communicator as an argument.

Buffers are contiguous one-dimensional torch tensors on the backend's device. Every method of a communicator is
collective over its ranks unless its docstring says otherwise: all ranks call it, in the same order. Constructors of
the higher layers and properties never communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import PeerMessages, Transport
from hpctrain.topology import Topology

T = TypeVar("T")


class ReduceOp(Enum):
    """Reduction operation of an all-reduce."""

    SUM = "sum"
    MAX = "max"


@runtime_checkable
class Collective(Protocol):
    """Collective operations over one group of ranks.

    Supported dtypes are float16, float32, float64, int32, int64 and uint8, and bfloat16 on every backend but Horovod.
    Results are bitwise equal on every rank of the group, and from run to run.

    Every operation raises BufferMismatch for invalid buffers or counts, and CommunicationError if the backend reports
    a failure.
    """

    @property
    def backend(self) -> str:
        """Name of the backend: `horovod`, `mpi`, `threads` or `serial`."""

    @property
    def rank(self) -> int:
        """This rank's index in the group, from 0."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def members(self) -> tuple[int, ...]:
        """World rank of each rank of the group, in group order."""

    def attribute(self, kind: type[T]) -> T:
        """Returns the instance of `kind` that belongs to this communicator; the first call creates it.

        A caller can keep data in this object that lives as long as the communicator. Not collective.
        """

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduces `buffer` over the ranks, in place. Collective.

        The backends mpi and threads sum float16 in float32 and round once; Horovod sums float16 in float16.

        Args:
            buffer: Tensor of shape (n,); n may be 0.
            op: Reduction operation.
        """

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        """Starts summing `buffer` over the ranks, in place. Collective.

        At most 16 sums may be in flight. A backend without asynchronous operations finishes the sum before it returns.

        Args:
            buffer: Tensor of shape (n,). It must not be used until the returned function has been called.
            number: Identifier of this sum: unique among the sums in flight, and the same on every rank. Horovod caches
                what the ranks have negotiated under this number, so always pass the same number for the same buffer.

        Returns:
            A function that waits until the sum is complete. Every rank must call it. If several sums are in flight,
            their functions may be called in any order.
        """

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        """Sums `buffer` over the ranks and returns this rank's slice of the sum. Collective.

        Args:
            buffer: Tensor of shape (sum(counts),). Its contents are unspecified afterwards.
            counts: Number of elements in each rank's slice, the same on every rank; an entry may be 0.

        Returns:
            A tensor of shape (counts[rank],).
        """

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the concatenation of all ranks' parts, in rank order. Collective.

        Args:
            part: This rank's part, shape (counts[rank],).
            counts: Number of elements in each rank's part, the same on every rank; an entry may be 0.
            out: Tensor of shape (sum(counts),) to fill and return instead of a new one. `part` may be exactly this
                rank's slice of it, but must not overlap it otherwise.

        Returns:
            A tensor of shape (sum(counts),).
        """

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Sends one slice of `buffer` to each rank, and returns the slices that this rank received.

        Collective. The counts may differ between ranks, but `receive_counts[b]` on rank a must equal `send_counts[a]`
        on rank b.

        Args:
            buffer: Tensor of shape (sum(send_counts),), whose r-th slice goes to rank r. It is not changed.
            send_counts: Number of elements for each rank; an entry may be 0.
            receive_counts: Number of elements from each rank; an entry may be 0.

        Returns:
            The received slices in rank order, shape (sum(receive_counts),).
        """

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        """Copies `buffer`, shape (n,), from the group's rank `root` to all other ranks, in place. Collective."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data`, in rank order. The lengths may differ and may be 0. Collective."""

    def barrier(self) -> None: ...

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        """Returns an object for collective reading and writing of files; None if the backend has none. Collective.

        Args:
            members: World ranks of the subgroup to which this rank belongs, in group order; each subgroup then has its
                own files. None means all ranks of this communicator.
        """

    def close(self) -> None:
        """Frees the communicator, which must not be used afterwards. Collective.

        Only closing a world waits for other ranks. A communicator that is not closed remains until the process ends.
        """


@runtime_checkable
class World(Collective, Protocol):
    """The group of all ranks. Only a world can create other groups and end the run."""

    @property
    def reduction_backend(self) -> str:
        """Backend of the worlds that `open_reduction_world` opens: `horovod` if the run uses it, else `backend`."""

    def open_reduction_world(self) -> World:
        """Returns a world of the same ranks over `reduction_backend`, with a separate message space. Collective.

        Use this world for reductions by that backend's own operations. Close the world after these reductions:
        Horovod's thread takes CPU time from training, and runs only while such a world is open.
        """

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        """Creates one communicator per group of world ranks. Collective over the world.

        Args:
            groups: World ranks of each group; the same on every rank.

        Returns:
            The communicator of this rank's group; None if this rank is in no group.

        Raises:
            BufferMismatch: A group is empty, or two groups have a rank in common.
        """

    def duplicate(self) -> Collective:
        """Returns a communicator of the same ranks with a separate message space, for use by another thread.

        Collective.
        """

    def open_group(self, members: Sequence[int]) -> tuple[Collective, PeerMessages | None] | None:
        """Creates a communicator for some world ranks, and a message space between them.

        Collective over `members` only. Close both objects when you no longer need them.

        Args:
            members: World ranks of the group, including this rank; in the same order on each of them.

        Returns:
            The communicator and the messages; the messages are None for a group of one rank. None instead of the pair
            if the backend cannot create a group without the ranks outside of it.
        """

    def transport(self, topology: Topology) -> Transport | None:
        """Returns point-to-point messages and node-shared memory for all ranks; None if the backend lacks these.

        Collective.

        Args:
            topology: Placement of the ranks, which decides which ranks share memory.
        """

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        """Returns memory that all ranks can read; None if the backend has none. Collective.

        Args:
            num_bytes: Size of this rank's part. It may differ between ranks and may be 0.
        """

    def abort(self, exit_code: int) -> None:
        """Ends every rank of the run at once with `exit_code`. Not collective; does not return."""

    def close(self) -> None:
        """Finishes communication. Collective. The communicator must not be used afterwards."""


class Attributes:
    """Base class of communicators that implements `Collective.attribute`.

    This is attribute caching, as in MPI 4.0, section 7.7.
    """

    def attribute(self, kind: type[T]) -> T:
        found: dict[type, Any] = self.__dict__.setdefault("_attributes", {})
        if kind not in found:
            found[kind] = kind()
        value: T = found[kind]
        return value


class Forwarding(Attributes):
    """Base class of worlds: forwards collective operations to `_group`, which the subclass's constructor sets."""

    _group: Collective

    @property
    def backend(self) -> str:
        return self._group.backend

    # Kept: each step asks for them dozens of times.
    @cached_property
    def rank(self) -> int:
        return self._group.rank

    @cached_property
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
        """Returns None: the backend cannot create a group without the other ranks.

        Backends that can do so override this method.
        """
        return None

    def close(self) -> None:
        self._group.close()

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        return self._group.collective_files(members=members)
