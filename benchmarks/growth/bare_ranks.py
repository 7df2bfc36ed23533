"""A rank that only uses MPI, and writes its memory to a folder: it sums over all ranks and over two levels of four, and
sends its counterparts on the other nodes two messages each, as the reduction `direct` does.

`hpctrain launch -n N -- python -m benchmarks.growth.bare_ranks FOLDER` shows how much memory MPI alone needs per rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

RANKS_PER_NODE = 4
ROUNDS = 50
TAGS = (1, 2)
MESSAGE_BYTES = 100


def resident_bytes() -> int:
    """Returns the resident memory of this process without pages of files, in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    (resident_kb,) = (int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    return 1024 * resident_kb


def main(folder: str) -> None:
    from mpi4py import MPI  # starts MPI, and the task of the other ranks imports this module elsewhere too

    world = MPI.COMM_WORLD
    node, place = divmod(world.rank, RANKS_PER_NODE)
    groups = [world, world.Dup(), world.Split(node, world.rank), world.Split(place, world.rank)]
    given, total = np.ones(1000, dtype=np.float32), np.zeros(1000, dtype=np.float32)
    messages = world.Dup()
    peers = [rank for rank in range(place, world.size, RANKS_PER_NODE) if rank != world.rank]
    received = np.zeros((len(TAGS), len(peers), MESSAGE_BYTES), dtype=np.uint8)
    sent = np.ones(MESSAGE_BYTES, dtype=np.uint8)
    for _ in range(ROUNDS):
        for group in groups:
            group.Allreduce(given, total)
        requests = [
            messages.Irecv(received[row, column], peer, tag)
            for row, tag in enumerate(TAGS)
            for column, peer in enumerate(peers)
        ]
        requests += [messages.Isend(sent, peer, tag) for tag in TAGS for peer in peers]
        MPI.Request.Waitall(requests)
    (Path(folder) / f"bare-{world.rank}").write_text(str(resident_bytes()))
    world.Barrier()


if __name__ == "__main__":
    main(sys.argv[1])
