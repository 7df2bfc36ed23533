"""Communication: the contract, what is built on it, and the way to open a backend."""

from hpctrain.comm.agreement import (
    agreed,
    all_gather_json,
    broadcast_json,
    check_same,
    check_same_buffer,
    describe_ranks,
    on_rank_0,
    raise_together,
)
from hpctrain.comm.communicator import Collective, ReduceOp, World
from hpctrain.comm.hierarchical import TwoLevel, all_reduce_hierarchical, make_two_level
from hpctrain.comm.monitored import Monitored
from hpctrain.comm.select import OpenedWorld, open_world
from hpctrain.comm.shared_folder import make_shared_folder
from hpctrain.comm.tensors import broadcast_tensors

__all__ = [
    "Collective",
    "Monitored",
    "OpenedWorld",
    "ReduceOp",
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
