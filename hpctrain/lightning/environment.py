"""Who this rank is, for Lightning."""

from __future__ import annotations

import os
import socket
from typing import final

from lightning.fabric.plugins.environments import ClusterEnvironment

from hpctrain.launch import identify
from hpctrain.run import Session


@final
class SessionEnvironment(ClusterEnvironment):
    """Lightning's ClusterEnvironment of a session's ranks. Does not communicate.

    session: over which torch.distributed is initialised (`hpctrain.init_process_group`).
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Returns whether mpirun or srun started this process."""
        return identify(os.environ, socket.gethostname()).num_ranks > 1

    def world_size(self) -> int:
        return self._session.world_size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided it."""

    def global_rank(self) -> int:
        return self._session.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided it."""

    def local_rank(self) -> int:
        return self._session.local_rank

    def node_rank(self) -> int:
        return self._session.topology.node_of(self._session.rank)
