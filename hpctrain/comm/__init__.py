"""Communication: the contract, what is built on it, and the way to open a backend."""

from hpctrain.comm.agreement import (
    agreed,
    all_gather_json,
    broadcast_json,
    check_same,
    on_rank_0,
    raise_together,
)
from hpctrain.comm.communicator import Collective, ReduceOp, World

__all__ = [
    "Collective",
    "ReduceOp",
    "World",
    "agreed",
    "all_gather_json",
    "broadcast_json",
    "check_same",
    "on_rank_0",
    "raise_together",
]
