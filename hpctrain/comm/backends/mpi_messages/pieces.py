"""In which pieces messages travel: of any, since MPI counts 32 bits, and smaller ones between nodes (ADR 60)."""

from __future__ import annotations

import functools
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Less than 2^31 - 1, and no length that a tensor is likely to have: where sender and receiver have buffers of different
# lengths, the sender's then ends with a shorter piece, by which the receiver notices it.
MOST_BYTES = (1 << 30) - 4096 - 64

# Below Open MPI's eager limit over TCP, 64 KiB with its header.
_EAGER_BYTES = 56 << 10
# Host interfaces by which MPI sends without TCP.
_FABRICS = ("infiniband", "cxi")


def piece_bytes(mpi: Any, comm: Any) -> int | None:
    """Returns the most bytes of a message of the ranks of `comm`; None if long ones are best, `MOST_BYTES`. Collective.

    mpi: the module mpi4py.MPI. A message above the eager limit waits for the receiver's answer before its bytes leave,
    and over TCP that answer waits behind all bytes that the receiver's own link still has to send. Within a node, and
    on other fabrics, it costs microseconds.
    """
    host = zlib.crc32(socket.gethostname().encode())
    found = np.array([host, -host, _has_fabric()], dtype=np.int64)
    comm.Allreduce(mpi.IN_PLACE, found, op=mpi.MAX)
    highest, negated_lowest, has_fabric = found.tolist()
    return None if has_fabric or highest == -negated_lowest else _EAGER_BYTES


def pieces(num_elems: int, *, most: int | None) -> Iterator[slice]:
    """Yields slices of at most `most` of so many elements, in their order; of all, if there is no limit."""
    most = most or max(1, num_elems)
    for begin in range(0, num_elems, most):
        yield slice(begin, min(begin + most, num_elems))


@functools.cache
def _has_fabric() -> bool:
    return any(any(Path("/sys/class", name).glob("*")) for name in _FABRICS)
