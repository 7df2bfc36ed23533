"""The address at which the ranks of a run find rank 0."""

from __future__ import annotations

import socket

from hpctrain.comm import host_addresses
from hpctrain.topology import Topology

_LOOPBACK = "127.0.0.1"


def address_of_rank_0(topology: Topology) -> str:
    """Returns a name or an address of this host, rank 0's, that the other ranks can connect to. Not collective.

    One node needs no name. A host of several whose own name does not resolve (in containers) is found by the address
    of a network interface.
    """
    if topology.num_nodes == 1:
        return _LOOPBACK
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return next(iter(host_addresses()), _LOOPBACK)
    return name
