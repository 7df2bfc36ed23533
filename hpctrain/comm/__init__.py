"""Communication: the contract, what is built on it, and the way to open a backend."""

from hpctrain.comm.backends.open_world import OpenedWorld, open_world
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.collectives.agreement import (
    agreed,
    all_gather_json,
    broadcast_json,
    check_same,
    check_same_buffer,
    describe_ranks,
    on_rank_0,
    raise_together,
)
from hpctrain.comm.collectives.broadcast_tensors import broadcast_tensors
from hpctrain.comm.collectives.shared_folder import make_shared_folder
from hpctrain.comm.collectives.two_level import TwoLevel, all_reduce_hierarchical, make_two_level
from hpctrain.comm.interface.communicator import Collective, ReduceOp, World
from hpctrain.comm.watchdog.monitored_world import Monitored

__all__ = [
    "Collective",
    "Monitored",
    "OpenedWorld",
    "ReduceOp",
    "SerialWorld",
    "TwoLevel",
    "World",
    "agreed",
    "all_gather_json",
    "all_reduce_hierarchical",
    "broadcast_json",
    "broadcast_tensors",
    "check_same",
    "check_same_buffer",
    "describe_ranks",
    "make_shared_folder",
    "make_two_level",
    "on_rank_0",
    "open_world",
    "raise_together",
]
