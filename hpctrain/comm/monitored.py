"""A deadline around any communicator: no rank waits for ever, and the missing ranks are named.

Wraps; changes no result. See `hpctrain.comm.watch` for what happens when an operation is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from hpctrain.comm.agreement import describe_ranks
from hpctrain.comm.communicator import Collective, ReduceOp, World
from hpctrain.comm.forwarding import Forwarding
from hpctrain.comm.watch import Track, Watcher


def _describe(buffer: torch.Tensor) -> str:
    return f"({buffer.numel()} x {str(buffer.dtype).removeprefix('torch.')})"


@final
class MonitoredGroup:
    """A communicator whose operations a watcher follows."""

    def __init__(self, inner: Collective, *, track: Track) -> None:
        self._inner = inner
        self._track = track

    @property
    def backend(self) -> str:
        return self._inner.backend

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def num_ranks(self) -> int:
        return self._inner.num_ranks

    @property
    def members(self) -> tuple[int, ...]:
        return self._inner.members

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        with self._track.during("all_reduce", _describe(buffer)):
            self._inner.all_reduce(buffer, op=op)

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        with self._track.during("reduce_scatter", _describe(buffer)):
            return self._inner.reduce_scatter(buffer, counts=counts)

    def all_gather(self, part: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        with self._track.during("all_gather", _describe(part)):
            return self._inner.all_gather(part, counts=counts)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        with self._track.during("all_to_all", _describe(buffer)):
            return self._inner.all_to_all(buffer, send_counts=send_counts, receive_counts=receive_counts)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        with self._track.during("broadcast", _describe(buffer)):
            self._inner.broadcast(buffer, root=root)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        with self._track.during("all_gather_bytes", f"({len(data)} bytes here)"):
            return self._inner.all_gather_bytes(data)

    def barrier(self) -> None:
        with self._track.during("barrier"):
            self._inner.barrier()


@final
class Monitored(Forwarding):
    """A world with a deadline, and so are the communicators made from it.

    timeout_s: an operation that takes longer ends the run with exit code 6. It must be more than the longest
    time one rank may rightly keep the others waiting (a checkpoint, an evaluation on rank 0).
    directory: a folder that all ranks see, for the positions of the ranks; made if need be. Without it the
    missing ranks cannot be named. step: set it to have it in the messages.
    """

    def __init__(self, world: World, *, timeout_s: float, directory: Path | None = None) -> None:
        self._world = world
        self._watcher = Watcher(
            rank=world.rank, timeout_s=timeout_s, directory=directory, abort=lambda code: world.abort(code)
        )
        self._track = self._watcher.track(group="world", members=world.members)
        self._group = MonitoredGroup(world, track=self._track)
        self._num_made = 0

    def publish_in(self, directory: Path) -> None:
        """Leave the positions of the ranks in `directory` from now on. Not collective. Raises OSError."""
        self._watcher.publish_in(directory)

    @property
    def step(self) -> int | None:
        return self._watcher.step

    @step.setter
    def step(self, step: int | None) -> None:
        self._watcher.step = step

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        with self._track.during("split"):
            inner = self._world.split(groups)
        self._num_made += 1  # counted on every rank, so that all members give the group one name
        if inner is None:
            return None
        name = f"split {self._num_made} ({describe_ranks(inner.members)})"
        return MonitoredGroup(inner, track=self._watcher.track(group=name, members=inner.members))

    def duplicate(self) -> Collective:
        with self._track.during("duplicate"):
            inner = self._world.duplicate()
        self._num_made += 1
        name = f"duplicate {self._num_made}"
        return MonitoredGroup(inner, track=self._watcher.track(group=name, members=inner.members))

    def abort(self, exit_code: int) -> None:
        self._watcher.end()
        self._world.abort(exit_code)

    def close(self) -> None:
        """Finish communication, still under the deadline, then stop watching. Collective."""
        with self._track.during("close"):
            self._world.close()
        self._watcher.end()
