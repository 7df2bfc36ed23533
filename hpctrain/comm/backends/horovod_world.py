"""All ranks of a Horovod run. Groups of ranks are process sets."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import final

from hpctrain.comm.backends.horovod_environment import (
    HorovodBuild,
    apply_settings,
    nccl_asked,
)
from hpctrain.comm.backends.horovod_group import all_have_mpi
from hpctrain.comm.backends.running_horovod import RunningHorovod, load_horovod
from hpctrain.comm.interface.buffer_checks import (
    MAX_CHUNK_ELEMS,
    check_groups,
)
from hpctrain.comm.interface.communicator import Collective
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import Transport
from hpctrain.comm.interface.world_forwarding import Forwarding
from hpctrain.topology import Topology


@final
class HorovodWorld(Forwarding):
    """All ranks of a Horovod run, with Horovod for every operation."""

    def __init__(self, horovod: RunningHorovod, *, is_run: bool = False) -> None:
        """Use `open`, or `open_reduction_world` of another world. is_run: closing it is the end of the run."""
        horovod.add_world()
        self._horovod = horovod
        self._is_run = is_run
        self._hvd = horovod.hvd
        self._closed = False
        everyone = tuple(range(self._hvd.size()))
        self._group = horovod.group(everyone, number=horovod.next_number())

    @classmethod
    def open(cls, *, algorithm: str | None = None, chunk_elems: int = MAX_CHUNK_ELEMS) -> HorovodWorld:
        """Starts Horovod, unless it runs already. Collective. LaunchError when it does not load or start.

        algorithm: of the recipe; `nccl-hierarchical` and `nccl-torus` are asked of Horovod here (see
        `horovod_environment`), which only a Horovod that does not run yet can follow.
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
        """MPI's, where Horovod runs over it: its own operations can only be waited for."""
        from hpctrain.comm.backends.mpi_world import open_transport

        return open_transport(topology) if self._all_have_mpi() else None

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        """MPI's, where Horovod runs over it."""
        from hpctrain.comm.backends.mpi_world import open_remote_memory

        return open_remote_memory(num_bytes) if self._all_have_mpi() else None

    def _all_have_mpi(self) -> bool:
        return all_have_mpi(self._hvd, self._group)

    def abort(self, exit_code: int) -> None:
        """End all ranks with `exit_code`, from whichever thread.

        Through MPI_Abort where mpi4py is there; else this process ends at once, and the launcher, which sees
        a rank end without finalizing, ends the others.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(Exception):
            from hpctrain.comm.backends.mpi_world import abort_all

            abort_all(exit_code)
        os._exit(exit_code)

    def close(self) -> None:
        """Finish communication. Collective. Horovod's thread stops with the last world over it."""
        if not self._closed:
            self._closed = True
            self._horovod.close_world()
            if self._is_run:
                self._horovod.stop()
