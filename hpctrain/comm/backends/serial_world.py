"""A world of one rank with the same interface as worlds of many ranks: user code needs no `if distributed`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch

from hpctrain.comm.interface.buffer_checks import (
    check_buffer,
    check_exchange,
    check_groups,
    check_out,
    check_part,
    check_root,
    check_slices,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles, LocalFiles
from hpctrain.comm.interface.communicator import Attributes, Collective, Forwarding, ReduceOp
from hpctrain.comm.interface.remote_memory import RemoteMemory, SharedRemoteMemory
from hpctrain.comm.interface.transport import PeerMessages, Transport
from hpctrain.topology import Topology


@final
class SerialGroup(Attributes):
    """A group of one rank. Other backends use this class too, with their own name as `backend`."""

    def __init__(self, *, member: int = 0, backend: str = "serial") -> None:
        self._member = member
        self._backend = backend

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def members(self) -> tuple[int, ...]:
        return (self._member,)

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        check_buffer(buffer, operation="all_reduce", rank=0)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        self.all_reduce(buffer)
        return lambda: None

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        check_slices(buffer, counts=counts, rank=0, num_ranks=1)
        return buffer.clone()

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_part(part, counts=counts, rank=0, num_ranks=1)
        check_out(out, part=part, counts=counts, rank=0)
        return part.clone() if out is None else out.copy_(part)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        check_exchange(buffer, send_counts=send_counts, receive_counts=receive_counts, rank=0, num_ranks=1)
        return buffer.clone()

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        check_buffer(buffer, operation="broadcast", rank=0)
        check_root(root, rank=0, num_ranks=1)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [bytes(data)]

    def barrier(self) -> None:
        return None

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles:
        return LocalFiles()

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


@final
class SerialWorld(Forwarding):
    """The world of a run with one rank."""

    def __init__(self) -> None:
        self._group = SerialGroup()

    @property
    def reduction_backend(self) -> str:
        return self.backend

    def open_reduction_world(self) -> SerialWorld:
        return SerialWorld()

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        check_groups(groups, num_ranks=1)
        return SerialGroup() if groups else None

    def duplicate(self) -> Collective:
        return SerialGroup()

    def open_group(self, members: Sequence[int]) -> tuple[Collective, PeerMessages | None]:
        return SerialGroup(), None

    def transport(self, topology: Topology) -> Transport | None:
        """Returns None: there is no other rank."""
        return None

    def remote_memory(self, num_bytes: int) -> RemoteMemory:
        return SharedRemoteMemory(
            parts=[np.zeros(num_bytes, dtype=np.uint8)], rank=0, barrier=self._group.barrier
        )

    def abort(self, exit_code: int) -> None:
        """Ends this process at once, from any thread."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def close(self) -> None:
        return None
