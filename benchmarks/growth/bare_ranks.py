"""A rank that only uses MPI, and writes its memory to a folder: it sums over all ranks and over two levels of four, and
sends its counterparts on the other nodes two messages each, as the reduction `direct` does.

`hpctrain launch -n N -- python -m benchmarks.growth.bare_ranks FOLDER` shows how much memory MPI alone needs per rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from benchmarks.memory import status_bytes

RANKS_PER_NODE = 4
ROUNDS = 50
TAGS = (1, 2)
MESSAGE_BYTES = 100


def main(folder: str) -> None:
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
    (Path(folder) / f"bare-{world.rank}").write_text(str(status_bytes("RssAnon")))
    world.Barrier()


if __name__ == "__main__":
    main(sys.argv[1])
