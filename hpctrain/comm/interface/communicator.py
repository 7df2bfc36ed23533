"""What a communication backend offers: small Protocols, and nothing else.

A backend is one final class in one file, and only that file imports the backend's library. Everything above
is written against these Protocols and takes the communicator as an argument.

Buffers are contiguous one-dimensional torch tensors on the backend's device. Every method below is
collective over the communicator's ranks unless it says otherwise: all ranks call it, in the same order.
Constructors of the higher layers and properties never communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

import torch

from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import Transport
from hpctrain.topology import Topology


class ReduceOp(Enum):
    SUM = "sum"
    MAX = "max"


@runtime_checkable
class Collective(Protocol):
    """Collective operations over one group of ranks.

    dtypes: float16, float32, float64, int32, int64, uint8. bfloat16 where the backend says so.
    Results are the same bits on every rank of the group, and from run to run.
    Raises CommunicationError when the backend reports a failure.
    """

    @property
    def backend(self) -> str:
        """`horovod`, `mpi`, `threads` or `serial`."""

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def members(self) -> tuple[int, ...]:
        """World rank of each place in the group."""

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce `buffer`, shape (n,), over the ranks, in place; n may be 0.

        float16 is summed in float32 and rounded once where the backend allows it (mpi, threads); Horovod
        sums float16 in float16.
        """

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        """Begin to sum `buffer` over the ranks, in place; returns a function that waits for the end.

        Collective; the function is not, but every rank calls it, and the buffer must not be used before. At most 16
        may be waited for at once, each with a number of its own, the same on every rank. Horovod keeps under it what
        the ranks have agreed on, so a buffer that is summed again is best given the same one. A backend whose
        operations only block is done when this returns.
        """

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        """Sum `buffer`, shape (sum(counts),), and return this rank's slice, shape (counts[rank],).

        `counts` is the same on every rank; an entry may be 0. `buffer` is left unspecified.
        """

    def all_gather(self, part: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' `part`s, shape (counts[rank],), into shape (sum(counts),)."""

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Send each rank its slice of `buffer`; what the ranks sent to this one, in rank order.

        buffer: shape (sum(send_counts),), unchanged; slice r goes to rank r. Returns shape
        (sum(receive_counts),). `send_counts` are this rank's own: on every pair of ranks a's
        `receive_counts[b]` must be b's `send_counts[a]`; entries may be 0.
        """

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        """Copy `buffer` of the group's rank `root` to every rank, in place."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in rank order. Lengths may differ and may be 0."""

    def barrier(self) -> None: ...

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        """Files that ranks read or write together; None where the backend has no such means.

        members: the world ranks of this rank's own subgroup, in the order of their places; None: all of this
        communicator. Collective over this communicator: ranks of other subgroups name theirs.
        """


@runtime_checkable
class World(Collective, Protocol):
    """The group of all ranks: the only one that makes other groups and the only one that ends the run."""

    @property
    def reduction_backend(self) -> str:
        """Name of the backend of `open_reduction_world`: `horovod` where the run asked for it, else `backend`."""

    def open_reduction_world(self) -> World:
        """Returns the same ranks over `reduction_backend`, in a message space of its own. Collective.

        For reductions that are to run by that library's own operations. Close it when they are done: Horovod's
        thread takes time from what the rank computes, and runs only while such a world is open.
        """

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        """One communicator per group of world ranks; returns this rank's, or None if it is in no group.

        Collective over the world. `groups` is the same on every rank and its members are disjoint.
        """

    def duplicate(self) -> Collective:
        """The same ranks, in a space of messages of its own, so that another thread may use it."""

    def transport(self, topology: Topology) -> Transport | None:
        """Messages and shared memory of their own over the same ranks; None where the backend has none. Collective."""

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        """Memory of every rank, `num_bytes` of this one, that all can read; None where the backend has none.

        Collective. Every rank may ask for another size, also 0.
        """

    def abort(self, exit_code: int) -> None:
        """End every rank of the run at once with `exit_code`. Not collective; does not return."""

    def close(self) -> None:
        """Finish communication. Collective. The communicator cannot be used afterwards."""
