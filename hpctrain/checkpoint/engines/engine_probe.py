"""Measures which engine is faster on a filesystem: writes a few MiB with each; another rank reads them back."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.engines.mpio_engine import write_together
from hpctrain.checkpoint.engines.posix_engine import write_direct
from hpctrain.checkpoint.engines.write_batch import ByteRange
from hpctrain.checkpoint.files.io_errors import explained, read_fully
from hpctrain.comm import Collective, ReduceOp, agreed, on_rank_0
from hpctrain.errors import CheckpointError

# Bytes per rank. The next size is measured if four times the last round's time still fits into the time limit.
_SIZES = (256 << 10, 1 << 20, 4 << 20)
_BUDGET_S = 1.5
_RANGE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Time of each engine for `rank_bytes` per rank, including fsync, in seconds: of the slowest rank, the better of
    two repetitions."""

    rank_bytes: int
    direct_s: float
    mpio_s: float

    def describe(self, *, num_ranks: int) -> str:
        mb = num_ranks * self.rank_bytes / 1e6
        return f"{mb / self.direct_s:.0f} MB/s direct, {mb / self.mpio_s:.0f} MB/s mpio"


def probe(directory: Path, *, comm: Collective) -> Probed:
    """Writes with both engines to the existing `directory` and returns the times. Collective; takes about a second.

    Raises CheckpointError on every rank if any rank fails, or reads other bytes than were written.
    """
    # Named like a partial checkpoint, so that the file of a killed run is removed along with those.
    name = on_rank_0(comm, lambda: f".step-00000000.h5.partial-{secrets.token_hex(8)}")
    path = directory / name
    try:
        begin_s = time.perf_counter()
        best = Probed(rank_bytes=0, direct_s=0.0, mpio_s=0.0)
        for rank_bytes in _SIZES:
            seconds = {"direct": float("inf"), "mpio": float("inf")}
            for engine in ("direct", "mpio", "mpio", "direct"):
                took_s = _slowest(comm, _one(path, engine=engine, rank_bytes=rank_bytes, comm=comm))
                seconds[engine] = min(seconds[engine], took_s)
            best = Probed(rank_bytes=rank_bytes, direct_s=seconds["direct"], mpio_s=seconds["mpio"])
            round_s = 2 * (best.direct_s + best.mpio_s)
            if _slowest(comm, time.perf_counter() - begin_s) + 4 * round_s > _BUDGET_S:
                break
        return best
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                path.unlink()


def _one(path: Path, *, engine: str, rank_bytes: int, comm: Collective) -> float:
    """Writes once and verifies the bytes. Returns the time of writing on this rank, in seconds. Collective."""
    on_rank_0(comm, lambda: _create(path, num_bytes=rank_bytes * comm.num_ranks), os_error=CheckpointError)
    mine = _pattern(comm.rank, num_bytes=rank_bytes)
    byte_ranges = _byte_ranges(mine, offset=comm.rank * rank_bytes)
    comm.barrier()
    begin_s = time.perf_counter()
    if engine == "mpio":
        agreed(comm, lambda: write_together(path, byte_ranges, comm=comm), os_error=CheckpointError)
    else:
        agreed(comm, lambda: write_direct(path, byte_ranges), os_error=CheckpointError)
    took_s = time.perf_counter() - begin_s
    # Read another rank's bytes, perhaps from another node: the rank's own ones could come from the local cache.
    other = (comm.rank + 1) % comm.num_ranks
    agreed(comm, lambda: _compare(path, rank=other, num_bytes=rank_bytes, engine=engine))
    return took_s


def _slowest(comm: Collective, seconds: float) -> float:
    """Returns the maximum over all ranks, so that all ranks decide alike. Collective."""
    buffer = torch.tensor([seconds], dtype=torch.float64)
    comm.all_reduce(buffer, op=ReduceOp.MAX)
    return float(buffer)


def _create(path: Path, *, num_bytes: int) -> None:
    with explained(action="measure writing to", path=path.parent):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, num_bytes)
        finally:
            os.close(fd)


def _pattern(rank: int, *, num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(rank).integers(0, 256, num_bytes, dtype=np.uint8)


def _byte_ranges(data: NDArray[np.uint8], *, offset: int) -> Iterator[ByteRange]:
    for begin in range(0, len(data), _RANGE_BYTES):
        yield offset + begin, data[begin : begin + _RANGE_BYTES].data


def _compare(path: Path, *, rank: int, num_bytes: int, engine: str) -> None:
    found = np.empty(num_bytes, dtype=np.uint8)
    with explained(action="read back", path=path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read_fully(fd, found.data, offset=rank * num_bytes)
        finally:
            os.close(fd)
    if not np.array_equal(found, _pattern(rank, num_bytes=num_bytes)):
        raise CheckpointError(
            f"the engine {engine} wrote wrong bytes to {path.parent} while measuring its speed"
        )
