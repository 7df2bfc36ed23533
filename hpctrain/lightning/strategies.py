"""Lightning's strategies on the ranks of a session: the launcher has decided how many there are."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import strategies

from hpctrain.launch import identify
from hpctrain.run import Session, init_process_group

# Who this rank is, for Lightning.


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


class _OnRanks(strategies.ParallelStrategy):
    """What the strategies have in common. Placed before one of Lightning's, whose __init__ takes the other options."""

    _started: Session | None = None  # by the newest strategy that was given none

    def __init__(
        self,
        session: Session | None = None,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
        watch_folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        if session is None and dist.is_initialized():
            session = _OnRanks._started
        if session is None or not dist.is_initialized():
            session = init_process_group(
                session, device=device, timeout_s=timeout_s, watch_folder=watch_folder
            )
            _OnRanks._started = session
        self._session = session
        super().__init__(**options)
        self.cluster_environment = SessionEnvironment(session)

    # The Trainer's `devices` and `num_nodes` do not count: it would set these.

    @property
    def parallel_devices(self) -> list[torch.device]:
        """This rank's device once for every rank of its node: Lightning takes their number from here."""
        topology = self._session.topology
        ranks = topology.groups("local")[topology.node_of(self._session.rank)]
        return [self._session.device] * len(ranks)

    @parallel_devices.setter
    def parallel_devices(self, devices: object) -> None:
        pass

    @property
    def num_nodes(self) -> int:
        return self._session.topology.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: object) -> None:
        pass


class DDPStrategy(_OnRanks, strategies.DDPStrategy):
    """Lightning's DDPStrategy over `hpctrain.init_process_group`, which it calls. Collective.

    Trainer(accelerator="cpu", strategy=DDPStrategy()); `devices` and `num_nodes` follow from the launcher.
    session: of `hpctrain.init` or `hpctrain.init_process_group`; None starts one, or takes that of an earlier strategy
    which did. device, timeout_s, watch_folder: as
    for `init_process_group`. options: of Lightning's class, such as find_unused_parameters.
    """

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Nodes may have different numbers of ranks.
        return {"num_replicas": self._session.world_size, "rank": self._session.rank}


class ModelParallelStrategy(_OnRanks, strategies.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over `hpctrain.init_process_group`, which it calls. Collective.

    For FSDP2 and tensor parallelism: `configure_model` of the LightningModule applies them, over `self.device_mesh`.
    session, device, timeout_s, watch_folder: as for `DDPStrategy`. options: of Lightning's class: data_parallel_size,
    tensor_parallel_size, save_distributed_checkpoint.
    """
