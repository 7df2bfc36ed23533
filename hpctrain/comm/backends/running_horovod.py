"""Starting and stopping Horovod in this process. The only file of hpctrain that imports horovod."""

from __future__ import annotations

import contextlib
import os
from typing import Any, final

import torch

from hpctrain.comm.backends.horovod_environment import (
    apply_settings,
    can_start_again,
    has_groups,
)
from hpctrain.comm.backends.horovod_group import HorovodGroup
from hpctrain.comm.backends.serial_world import SerialGroup
from hpctrain.comm.interface.buffer_checks import (
    MAX_CHUNK_ELEMS,
)
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CommunicationError, LaunchError


def load_horovod() -> Any:
    """Returns the module horovod.torch, not started. Raises LaunchError if it cannot be loaded."""
    try:
        import horovod.torch as hvd
    except (ImportError, OSError, RuntimeError) as error:
        raise LaunchError(
            f"Horovod cannot be loaded ({error}): build it (make setup), or choose the backend mpi"
        ) from error
    return hvd


def _start(hvd: Any) -> None:
    """Starts Horovod. Collective over all ranks. Raises LaunchError if it does not start."""
    try:
        hvd.init()
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"Horovod does not start: {error}") from error


@final
class RunningHorovod:
    """Running Horovod of this process, and the state its worlds share: process sets and communicator numbers."""

    def __init__(self, hvd: Any, *, chunk_elems: int, owned: bool) -> None:
        """Use `start`. hvd: horovod.torch, initialised. owned: stop Horovod when the last world is closed."""
        self.hvd = hvd
        self.chunk_elems = chunk_elems
        self.running = True
        self._owned = owned
        self._num_worlds = 0
        self._num_made = 0
        self._process_sets: dict[tuple[int, ...], Any] = {}

    @classmethod
    def start(cls, hvd: Any, *, chunk_elems: int = MAX_CHUNK_ELEMS) -> RunningHorovod:
        """Starts Horovod, unless the user's script has. Collective over all ranks. Raises LaunchError if it fails.

        If the script started Horovod, it is left running at the end, since the script may still use it.
        """
        owned = not hvd.is_initialized()
        _start(hvd)
        return cls(hvd, chunk_elems=chunk_elems, owned=owned)

    def add_world(self) -> None:
        """Registers a world, which must call `close_world` once. Called on every rank."""
        self._num_worlds += 1

    def close_world(self) -> None:
        """Unregisters a world; stops Horovod after the last one, if it can start again. Collective over all ranks."""
        self._num_worlds -= 1
        if self._num_worlds == 0 and can_start_again(os.environ):
            self.stop()

    def stop(self) -> None:
        """Stops Horovod's thread if it runs and was started here. Collective over all ranks."""
        if not self.running:
            return
        self.running = False
        if not self._owned:
            return
        # The first rank that shuts down ends Horovod on all ranks, also on one that still frees communicators or
        # memory: this all-reduce is a barrier. It fails if a rank has left without closing, which ended Horovod.
        # A fixed name, so that the ranks meet here even if their operation counters differ.
        with contextlib.suppress(self.hvd.mpi_ops.HorovodInternalError, ValueError):
            self.hvd.allreduce(torch.zeros(1, dtype=torch.int32), name="hpctrain.close", op=self.hvd.Sum)
        self.hvd.shutdown()

    def next_number(self) -> int:
        """Returns the next number for a communicator's name. Every rank calls it for each communicator."""
        self._num_made += 1
        return self._num_made

    def group(self, members: tuple[int, ...], *, number: int) -> Collective:
        """Returns a communicator over `members`, which include this rank. Their process set must exist."""
        if len(members) == 1:
            return SerialGroup(member=members[0], backend="horovod")
        return HorovodGroup(
            self.hvd,
            process_set=self.process_set(members),
            members=members,
            name=f"{number}",
            chunk_elems=self.chunk_elems,
        )

    def _allow_groups(self) -> None:
        """Restarts Horovod if it was started without groups. Collective over all ranks; nothing may be in flight."""
        if not self._owned or has_groups(os.environ):
            return
        self.stop()
        apply_settings(os.environ)
        _start(self.hvd)
        self.running = True

    def process_set(self, members: tuple[int, ...]) -> Any:
        """Returns the process set of these ranks; makes it on the first call. Collective over all ranks.

        Raises CommunicationError if Horovod cannot make it.
        """
        ranks = tuple(sorted(members))
        if len(ranks) == self.hvd.size():
            return self.hvd.global_process_set
        if ranks not in self._process_sets:
            self._allow_groups()
            # Horovod allows one process set per set of ranks; communicators over it differ by name.
            try:
                self._process_sets[ranks] = self.hvd.add_process_set(list(ranks))
            except (ValueError, RuntimeError) as error:
                raise CommunicationError(
                    f"Horovod cannot make a group of ranks {list(ranks)} ({error}): if the script calls hvd.init() "
                    "before hpctrain, remove that call, or set HOROVOD_DYNAMIC_PROCESS_SETS=1 before it"
                ) from error
        return self._process_sets[ranks]
