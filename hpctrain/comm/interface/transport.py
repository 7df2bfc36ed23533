"""Messages between ranks and memory shared within a node: for reductions that make their own schedule.

A backend's collective operations block until they are done. A reduction that keeps the wire, the node's
memory and the conversions busy at the same time needs operations that it can start and look at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from hpctrain.topology import Topology

# An operation under way, as the backend knows it.
Pending = Any

# The least that MPI guarantees: 0 <= tag < NUM_TAGS.
NUM_TAGS = 32768


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
        """Begin to receive into `buffer`. Messages with one source and tag arrive in the order of sending."""

    def all_done(self, pending: Sequence[Pending]) -> bool:
        """Whether all are finished; looks, does not wait, and lets the library make progress."""

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        """Memory that all ranks of this node see: `num_bytes` zeroed bytes of each, by local rank.

        Collective over the node; every rank of a node may ask for another size. CommunicationError, on every
        rank of the node, where the node has no such memory left (say /dev/shm is too small).
        """

    def fence(self) -> None:
        """Order this rank's reads and writes of shared memory: those before come before those after."""

    def begun(self, what: str) -> None:
        """Tell who watches that the next reduction has begun: counted, the same on every rank."""

    def waits(self, what: str) -> None:
        """Tell who watches that nothing under way got on; the deadline runs until `got_on`."""

    def got_on(self) -> None:
        """Tell who watches that something got on, or that nothing is under way."""

    def close(self) -> None:
        """Give back the messages and the memory. Collective. Tensors of `share` must not be used afterwards."""
