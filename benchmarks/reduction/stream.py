"""A plain MPI stream: the rate of the links when only large messages are sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.topology import Topology

# With 1, 2, 4 and 12 messages of 12.6 MB in total the rate was the same within the noise, which was least with 12.
NUM_MESSAGES = 12


def ring_shift(comm: Any, *, topology: Topology, num_bytes: int) -> Callable[[], None]:
    """Returns a function in which one rank of each node sends `num_bytes` to the next node and receives as many from
    the previous one. All messages are in flight at once; the other ranks sleep. Calling the function is collective.
    """
    from mpi4py import MPI

    firsts = [ranks[0] for ranks in topology.groups("local")]
    rank = comm.Get_rank()
    if rank not in firsts:
        return lambda: wait_asleep(comm)
    place = firsts.index(rank)
    to, source = firsts[(place + 1) % len(firsts)], firsts[place - 1]
    out = [np.ones(num_bytes // NUM_MESSAGES, dtype=np.uint8) for _ in range(NUM_MESSAGES)]
    into = [np.ones(num_bytes // NUM_MESSAGES, dtype=np.uint8) for _ in range(NUM_MESSAGES)]

    def shift() -> None:
        requests = [comm.Irecv(part, source=source, tag=7) for part in into]
        requests += [comm.Isend(part, dest=to, tag=7) for part in out]
        MPI.Request.Waitall(requests)
        wait_asleep(comm)

    return shift


def wait_asleep(comm: Any) -> None:
    """A barrier whose waiting ranks sleep, so that working ranks have the cores. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)
