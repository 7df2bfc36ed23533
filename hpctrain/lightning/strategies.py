"""Lightning's strategies on the ranks of a session. The launcher decides how many ranks there are, not the Trainer."""

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

# The rank's identity, for Lightning.


@final
class SessionEnvironment(ClusterEnvironment):
    """Lightning's ClusterEnvironment for the ranks of a session. Does not communicate.

    session: a session over which torch.distributed is initialised (`hpctrain.init_process_group`).
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
        """Returns True if mpirun or srun started this process with other ranks."""
        return identify(os.environ, socket.gethostname()).num_ranks > 1

    def world_size(self) -> int:
        return self._session.world_size

    def set_world_size(self, size: int) -> None:
        """Does nothing, since the launcher decides the number of ranks."""

    def global_rank(self) -> int:
        return self._session.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing, since the launcher decides the rank of each process."""

    def local_rank(self) -> int:
        return self._session.local_rank

    def node_rank(self) -> int:
        return self._session.topology.node_of(self._session.rank)


# Lightning's strategies on the ranks of a session.


class _OnRanks(strategies.ParallelStrategy):
    """The common base class of the strategies.

    In a strategy's list of base classes, this class stands before Lightning's class, whose __init__ takes the other
    options.
    """

    _started: Session | None = None  # the session that the newest strategy has started

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

    # The Trainer's `devices` and `num_nodes`, with which it would set these, are ignored.

    @property
    def parallel_devices(self) -> list[torch.device]:
        """A list with this rank's device, once for each rank of its node.

        Lightning takes the number of ranks of the node from the length of the list.
        """
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
    """Lightning's DDPStrategy on the ranks of a session.

    The constructor calls `hpctrain.init_process_group` and is collective.

    Use it as `Trainer(accelerator="cpu", strategy=DDPStrategy())`. `devices` and `num_nodes` follow from the launcher.

    Args:
        session: A session of `hpctrain.init` or `hpctrain.init_process_group`. None: the session that an earlier
            strategy started, or a new one.
        device: "cpu", "cuda" or "auto"; see `init_process_group`.
        timeout_s: The time limit of an operation in seconds.
        watch_folder: A folder on a filesystem that all nodes share. With it, the message at the time limit names the
            missing ranks.
        **options: Options of Lightning's class, such as find_unused_parameters.
    """

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Nodes may have different numbers of ranks.
        return {"num_replicas": self._session.world_size, "rank": self._session.rank}


class ModelParallelStrategy(_OnRanks, strategies.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy on the ranks of a session. Creating it is collective, as for `DDPStrategy`.

    Use this class for FSDP2 and tensor parallelism, which `configure_model` of the LightningModule applies over
    `self.device_mesh`.

    Args:
        session: A session of `hpctrain.init` or `hpctrain.init_process_group`. None: the session that an earlier
            strategy started, or a new one.
        device: "cpu", "cuda" or "auto"; see `init_process_group`.
        timeout_s: The time limit of an operation in seconds.
        watch_folder: A folder on a filesystem that all nodes share. With it, the message at the time limit names the
            missing ranks.
        **options: Options of Lightning's class, such as data_parallel_size, tensor_parallel_size and
            save_distributed_checkpoint.
    """
