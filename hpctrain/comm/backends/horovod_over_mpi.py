"""A world that uses Horovod for Horovod's own reductions and MPI for everything else.

Horovod's thread polls inside MPI on a core that also computes, and every operation waits for the thread's next cycle.
Two ranks on two cores ran 825 backward passes/s without Horovod and 480 with an idle one; a checkpoint took 4.5 s
instead of 0.17. So control messages and hpctrain's own reductions use MPI; Horovod is started when one of its own
reductions is requested, and stopped when the last world over it is closed. See docs/adr/0023.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, final

from hpctrain.comm.backends.horovod_environment import HorovodBuild, apply_settings, nccl_asked
from hpctrain.comm.backends.horovod_world import HorovodWorld
from hpctrain.comm.backends.running_horovod import RunningHorovod
from hpctrain.comm.interface.buffer_checks import MAX_CHUNK_ELEMS
from hpctrain.comm.interface.communicator import Collective, World
from hpctrain.comm.interface.peer_messages import PeerMessages
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import Transport
from hpctrain.comm.interface.world_forwarding import Forwarding
from hpctrain.topology import Topology


@final
class HorovodOverMpi(Forwarding):
    """An MPI world whose reduction worlds are Horovod's. `backend` is `mpi`, which runs the other operations."""

    def __init__(
        self, mpi: World, *, hvd: Any, algorithm: str | None = None, chunk_elems: int = MAX_CHUNK_ELEMS
    ) -> None:
        """mpi: closed along with this world. hvd: horovod.torch, loaded. algorithm: see `HorovodWorld.open`."""
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
        """See `World.open_reduction_world`. Starts Horovod unless it runs; raises LaunchError if it does not start."""
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
        """Stops Horovod if one of its worlds is still open, and finishes communication. Collective."""
        if self._horovod is not None:
            self._horovod.stop()
        self._mpi.close()
