"""Messages between ranks and memory shared within a node: for reductions that make their own schedule.

A backend's collective operations block until they are done. A reduction that keeps the wire, the node's
memory and the conversions busy at the same time needs operations that it can start and look at again.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from hpctrain.topology import Topology


class Pending(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether it is finished; looks, does not wait, and lets the library make progress."""


@runtime_checkable
class Transport(Protocol):
    """This rank's end of a space of messages of its own, over all ranks. Used by one thread at a time.

    Buffers are contiguous one-dimensional uint8 tensors in host memory. Raises CommunicationError when the
    library reports a failure.
    """

    @property
    def rank(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        """Begin to send `buffer` to rank `to`. It must not change before the operation is done."""

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Pending:
        """Begin to receive into `buffer`. Messages with one source and tag arrive in the order of sending.

        0 <= tag < 32768, the least that MPI guarantees.
        """

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        """Memory that all ranks of this node see: `num_bytes` zeroed bytes of each, by local rank.

        Collective over the node; every rank of a node may ask for another size. CommunicationError, on every
        rank of the node, where the node has no such memory left (say /dev/shm is too small).
        """

    def fence(self) -> None:
        """Make what this rank wrote to shared memory visible before what it writes after, and so for reads."""

    def close(self) -> None:
        """Give back the messages and the memory. Collective. Tensors of `share` must not be used afterwards."""
