"""Worlds (communicators of all ranks) of a Horovod run: over Horovod alone, or over MPI with Horovod for reductions.

Groups of ranks are Horovod's process sets.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, final

from hpctrain.comm.backends.horovod_group import all_have_mpi
from hpctrain.comm.backends.running_horovod import (
    HorovodBuild,
    RunningHorovod,
    apply_settings,
    load_horovod,
    nccl_asked,
)
from hpctrain.comm.interface.buffer_checks import (
    MAX_CHUNK_ELEMS,
    check_groups,
)
from hpctrain.comm.interface.communicator import Collective, Forwarding, World
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import PeerMessages, Transport
from hpctrain.topology import Topology


@final
class HorovodWorld(Forwarding):
    """The world of all ranks of a Horovod run, which uses Horovod for every operation."""

    def __init__(self, horovod: RunningHorovod, *, is_run: bool = False) -> None:
        """Creates a world over a running Horovod. Use `open`, or `open_reduction_world` of another world.

        is_run: True for the main world of the run. Closing the main world stops Horovod even if another world is open,
        unless the user's script has started Horovod.
        """
        horovod.add_world()
        self._horovod = horovod
        self._is_run = is_run
        self._hvd = horovod.hvd
        self._closed = False
        everyone = tuple(range(self._hvd.size()))
        self._group = horovod.group(everyone, number=horovod.next_number())

    @classmethod
    def open(cls, *, algorithm: str | None = None, chunk_elems: int = MAX_CHUNK_ELEMS) -> HorovodWorld:
        """Starts Horovod, unless it is running, and returns the world of all ranks. Collective.

        algorithm: the recipe's reduction algorithm. `nccl-hierarchical` and `nccl-torus` are switched on here (see
        `running_horovod`), without effect if Horovod is already running.

        Raises LaunchError if Horovod cannot be loaded or does not start.
        """
        hvd = load_horovod()
        if not hvd.is_initialized():
            apply_settings(os.environ, algorithm=algorithm)
        return cls(RunningHorovod.start(hvd, chunk_elems=chunk_elems), is_run=True)

    @property
    def build(self) -> HorovodBuild:
        hvd = self._hvd
        return HorovodBuild(
            nccl=bool(hvd.nccl_built()), mpi=bool(hvd.mpi_enabled()), nccl_asked=nccl_asked(os.environ)
        )

    @property
    def reduction_backend(self) -> str:
        return "horovod"

    def open_reduction_world(self) -> HorovodWorld:
        return HorovodWorld(self._horovod)

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        check_groups(groups, num_ranks=self.num_ranks)
        mine: Collective | None = None
        for group in groups:
            number, members = self._horovod.next_number(), tuple(group)
            if len(members) > 1:
                self._horovod.process_set(members)
            if self.rank in members:
                mine = self._horovod.group(members, number=number)
        return mine

    def duplicate(self) -> Collective:
        return self._horovod.group(self.members, number=self._horovod.next_number())

    def transport(self, topology: Topology) -> Transport | None:
        """Returns MPI's transport if Horovod runs over MPI, otherwise None: Horovod has no point-to-point messages."""
        from hpctrain.comm.backends.mpi_world import open_transport

        return open_transport(topology) if self._all_have_mpi() else None

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        """Returns MPI's remote memory if Horovod runs over MPI, otherwise None."""
        from hpctrain.comm.backends.mpi_world import open_remote_memory

        return open_remote_memory(num_bytes) if self._all_have_mpi() else None

    def _all_have_mpi(self) -> bool:
        return all_have_mpi(self._hvd, self._group)

    def abort(self, exit_code: int) -> None:
        """Ends all ranks with `exit_code`, from any thread.

        Calls MPI_Abort if mpi4py is installed. Otherwise this process ends at once, and the launcher then ends all
        other ranks, because a rank has ended without finalizing.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(Exception):
            from hpctrain.comm.backends.mpi_world import abort_all

            abort_all(exit_code)
        os._exit(exit_code)

    def close(self) -> None:
        """Finishes communication. Collective.

        Stops Horovod if this is the main world of the run, or if it is the last open world and Horovod can be started
        again in this process.
        """
        if not self._closed:
            self._closed = True
            self._horovod.close_world()
            if self._is_run:
                self._horovod.stop()


@final
class HorovodOverMpi(Forwarding):
    """An MPI world that uses Horovod only in the worlds that `open_reduction_world` returns.

    All other operations use MPI, so `backend` is `mpi`.

    Horovod's thread polls inside MPI on a core that also computes, and every operation waits for the thread's next
    cycle. Two ranks on two cores ran 825 backward passes/s without Horovod and 480 with an idle Horovod; a checkpoint
    took 4.5 s instead of 0.17 s. So control messages and hpctrain's own reductions use MPI. `open_reduction_world`
    starts Horovod, and closing the last of the worlds that it has returned stops Horovod. See docs/adr/0023.
    """

    def __init__(
        self, mpi: World, *, hvd: Any, algorithm: str | None = None, chunk_elems: int = MAX_CHUNK_ELEMS
    ) -> None:
        """Creates the world; Horovod is not started.

        mpi: MPI world, which is closed together with this one.
        hvd: the loaded module horovod.torch.
        algorithm: the recipe's reduction algorithm, see `HorovodWorld.open`.
        """
        self._mpi = self._group = mpi
        self._hvd = hvd
        self._chunk_elems = chunk_elems
        self._horovod: RunningHorovod | None = None
        if not hvd.is_initialized():
            apply_settings(os.environ, algorithm=algorithm, groups=False)
        self.build = HorovodBuild(nccl=bool(hvd.nccl_built()), mpi=True, nccl_asked=nccl_asked(os.environ))

    @property
    def reduction_backend(self) -> str:
        return "horovod"

    def open_reduction_world(self) -> World:
        """Returns a world of the same ranks over Horovod; see `World.open_reduction_world`. Collective.

        Starts Horovod unless Horovod is already running. Raises LaunchError if Horovod does not start.
        """
        if self._horovod is None or not self._horovod.running:
            self._horovod = RunningHorovod.start(self._hvd, chunk_elems=self._chunk_elems)
        return HorovodWorld(self._horovod)

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        return self._mpi.split(groups)

    def duplicate(self) -> Collective:
        return self._mpi.duplicate()

    def open_group(self, members: Sequence[int]) -> tuple[Collective, PeerMessages | None] | None:
        return self._mpi.open_group(members)

    def transport(self, topology: Topology) -> Transport | None:
        return self._mpi.transport(topology)

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        return self._mpi.remote_memory(num_bytes)

    def abort(self, exit_code: int) -> None:
        self._mpi.abort(exit_code)

    def close(self) -> None:
        """Stops Horovod if a world of `open_reduction_world` is still open, and finishes communication. Collective."""
        if self._horovod is not None:
            self._horovod.stop()
        self._mpi.close()
