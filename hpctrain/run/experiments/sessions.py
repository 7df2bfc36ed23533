"""Sessions of trials: of this rank alone, and of all ranks, over communication that stays open."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hpctrain.comm import Monitored, SerialWorld
from hpctrain.distributed import is_sharded
from hpctrain.topology import Topology


def alone(session: Any) -> Any:
    """Returns a session of one rank, on this rank's device, that communicates with no other."""
    cores = session.gather_cores()[session.rank]
    world = Monitored(SerialWorld(), timeout_s=session.world.limits.settings.timeout_s)
    topology = Topology.from_node_names([session.identity.node_name])
    world.place(topology)
    return type(session)(
        identity=session.identity, world=world, topology=topology, device=session.device, cores=[cores]
    )


def together(session: Any) -> Any:
    """Returns a new session of all ranks over the communication of `session`. Collective."""
    return type(session)(
        identity=session.identity, world=session.world, topology=session.topology, device=session.device,
        cores=session.gather_cores(),
    )  # fmt: skip


def sum_exactly(session: Any) -> None:
    """Has the session's updaters sum gradients in their own dtype, by an algorithm that is not measured first.

    They do not compare the ranks: the trials go on after a difference, and the check measures where it begins.
    """
    session.distributed_optimizer = partial(_exact_updater, session.distributed_optimizer)


def _exact_updater(make: Any, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
    algorithm = "auto" if is_sharded(model) else "flat"  # of a sharded model: FSDP2's own operation
    return make(model, *args, **{**options, "wire": "fp32", "algorithm": algorithm, "compare_ranks": "off"})


def sum_during_backward(session: Any) -> None:
    """Has gradients summed on a thread while backward goes on, also where ranks have no core for it."""
    session.reductions.overlap = lambda *, spare_core: True
