"""A world's collective operations, forwarded to its group of all ranks. Shared by all backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpctrain.comm.interface.attributes import Attributes
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.comm.interface.peer_messages import PeerMessages


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
