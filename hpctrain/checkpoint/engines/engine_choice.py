"""Chooses how a checkpoint's bytes are written: the requested or the faster engine, the same on all ranks.

"auto" decides by the kind of the filesystem, by what the ranks' MPI supports, and on shared filesystems by a
measurement.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.engines.write_batch import ByteRange, paced
from hpctrain.checkpoint.engines.write_engines import (
    HINTS,
    files_of,
    obstacle_to_mpio,
    own_group,
    write_collectively,
    write_direct,
)
from hpctrain.checkpoint.files.direct_io import Staging
from hpctrain.checkpoint.files.io_errors import explained, read_fully
from hpctrain.checkpoint.files.lustre_striping import alignment_of, stripes_for
from hpctrain.comm import Collective, ReduceOp, agreed, all_gather_json, describe_ranks, on_rank_0
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.storage import Filesystem, filesystem_of

# Measures which engine is faster on a filesystem: writes a few MiB with each; another rank reads them back.


# Bytes per rank. The next size is measured if four times the last round's time still fits into the time limit.
_SIZES = (256 << 10, 1 << 20, 4 << 20)
_BUDGET_S = 1.5
_RANGE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Measured write times of the two engines, in seconds, including fsync.

    In the measurement each rank wrote `rank_bytes` bytes. A time is that of the slowest rank, in the better of two
    repetitions.
    """

    rank_bytes: int
    direct_s: float
    mpio_s: float

    def describe(self, *, num_ranks: int) -> str:
        mb = num_ranks * self.rank_bytes / 1e6
        return f"{mb / self.direct_s:.0f} MB/s direct, {mb / self.mpio_s:.0f} MB/s mpio"


def probe(directory: Path, *, comm: Collective) -> Probed:
    """Measures the speed of both engines by writing to `directory`, which must exist. Collective; takes a second.

    Raises CheckpointError on every rank if any rank cannot write, or reads back bytes that differ.
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
    """Writes a file once with `engine`, verifies its bytes, and returns this rank's time in seconds. Collective."""
    on_rank_0(comm, lambda: _create(path, num_bytes=rank_bytes * comm.num_ranks), os_error=CheckpointError)
    mine = _pattern(comm.rank, num_bytes=rank_bytes)
    byte_ranges = _byte_ranges(mine, offset=comm.rank * rank_bytes)
    comm.barrier()
    begin_s = time.perf_counter()
    if engine == "mpio":
        agreed(comm, lambda: write_collectively(path, byte_ranges, comm=comm), os_error=CheckpointError)
    else:
        agreed(comm, lambda: write_direct(path, byte_ranges), os_error=CheckpointError)
    took_s = time.perf_counter() - begin_s
    # Read another rank's bytes, perhaps from another node: the rank's own ones could come from the local cache.
    other = (comm.rank + 1) % comm.num_ranks
    agreed(comm, lambda: _compare(path, rank=other, num_bytes=rank_bytes, engine=engine))
    return took_s


def _slowest(comm: Collective, seconds: float) -> float:
    """Returns the time of the slowest rank, so that all ranks make the same choice. Collective."""
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


# Chooses the engine.


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """The chosen engine, DIRECT or MPIO (see `Engine`), which writes the bytes of a checkpoint.

    `note` is the reason for the choice in words, and `filesystem` the filesystem of the checkpoint directory as
    rank 0 sees it.
    """

    engine: Engine
    note: str
    filesystem: Filesystem

    def write(
        self,
        path: Path,
        byte_ranges: Iterable[ByteRange],
        *,
        structure: Iterable[ByteRange],
        comm: Collective,
        groups: Sequence[Sequence[int]],
        bypass_cache: bool = False,
        staging: Staging | None = None,
        limit_bytes_per_s: float | None = None,
    ) -> None:
        """Writes this rank's bytes to the existing file at `path` and flushes them to disk.

        Collective with MPIO (see `write_collectively`), not collective with DIRECT.

        Args:
            path: The file, already allocated.
            byte_ranges: The content, as pairs of file offset and bytes.
            structure: Further byte ranges, which will soon be read back.
            comm: All ranks of the save.
            groups: World ranks that write to each file, for MPIO; see `write_collectively`.
            bypass_cache: Write past the page cache, for DIRECT; see `write_direct`.
            staging: Provides the memory in which small byte ranges are joined, for DIRECT; see `write_direct`.
            limit_bytes_per_s: Maximum write rate of this rank, in bytes/s; None: no limit.

        Raises:
            CheckpointError: Only on the ranks that fail; the caller must exchange the outcome.
        """
        if limit_bytes_per_s is not None:
            structure = paced(structure, limit_bytes_per_s=limit_bytes_per_s)
            byte_ranges = paced(byte_ranges, limit_bytes_per_s=limit_bytes_per_s)
        if self.engine is Engine.MPIO:
            hints = dict(HINTS)
            if self.filesystem.is_lustre:
                num_ranks = len(own_group(comm, groups=groups))
                hints.update(stripes_for(_size_of(path)).hints(num_ranks=num_ranks))
            write_collectively(
                path, itertools.chain(structure, byte_ranges), comm=comm, groups=groups, hints=hints,
                block_bytes=alignment_of(self.filesystem),
            )  # fmt: skip
        else:
            write_direct(path, byte_ranges, structure=structure, bypass_cache=bypass_cache, staging=staging)


def _size_of(path: Path) -> int:
    """Returns the length of a file in bytes, or 0 after an error, which opening the file will then raise."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# Cached choices by communicator object. All ranks of a communicator have the same entries.
_chosen: WeakKeyDictionary[Collective, dict[tuple[Engine, str, bool], EngineChoice]] = WeakKeyDictionary()


def choose_engine(
    requested: Engine, *, directory: Path, comm: Collective, in_background: bool = False
) -> EngineChoice:
    """Returns the engine for checkpoints in `directory`. Collective; the result is cached per `comm` and `directory`.

    Args:
        requested: AUTO chooses DIRECT for one rank, in the background, and on local filesystems; elsewhere both engines
            are measured once, and the faster engine is chosen.
        directory: Directory of the checkpoints.
        comm: The ranks that save together.
        in_background: True if another thread writes. That thread must not communicate, so only DIRECT is possible.

    Returns:
        The engine, the reason for the choice, and the kind of the filesystem.

    Raises:
        UsageError: On every rank, if MPIO is requested in the background.
        CheckpointError: On every rank, if MPIO is requested and a rank does not support it.
    """
    if in_background and requested is Engine.MPIO:
        raise UsageError(
            "the engine mpio writes with all ranks at once, which a background thread cannot: save in the "
            "foreground, or use the engine direct or auto",
            agreed=True,
        )
    known = _chosen.setdefault(comm, {})
    key = (requested, str(directory), in_background)
    if key not in known:
        known[key] = _choose(requested, directory=directory, comm=comm, in_background=in_background)
    return known[key]


def _choose(requested: Engine, *, directory: Path, comm: Collective, in_background: bool) -> EngineChoice:
    mine = {"obstacle": obstacle_to_mpio(comm), "kind": filesystem_of(directory).kind}
    by_rank = all_gather_json(comm, mine)
    filesystem = Filesystem(kind=by_rank[0]["kind"])
    obstacle = _described([entry["obstacle"] for entry in by_rank], comm=comm)

    def choice(engine: Engine, note: str) -> EngineChoice:
        return EngineChoice(engine=engine, note=note, filesystem=filesystem)

    if requested is Engine.DIRECT:
        return choice(Engine.DIRECT, "requested")
    if requested is Engine.AUTO:
        if comm.num_ranks == 1:
            return choice(Engine.DIRECT, "there is only one rank")
        if in_background:
            return choice(Engine.DIRECT, "a background thread cannot use MPI-IO")
        shared = sorted({entry["kind"] for entry in by_rank if Filesystem(kind=entry["kind"]).is_shared})
        if not shared:
            return choice(Engine.DIRECT, f"{filesystem.kind} is a local filesystem")
    if obstacle is None and files_of(comm) is None:
        obstacle = "Horovod runs without MPI"
    if requested is Engine.MPIO:
        if obstacle is not None:
            raise CheckpointError(
                f"the engine mpio cannot be used: {obstacle}: use direct or auto", agreed=True
            )
        return choice(Engine.MPIO, "requested")
    if obstacle is not None:
        return choice(Engine.DIRECT, obstacle)
    try:
        on_rank_0(comm, lambda: directory.mkdir(parents=True, exist_ok=True), os_error=CheckpointError)
        probed = probe(directory, comm=comm)
    except CheckpointError as error:
        return choice(Engine.DIRECT, f"measuring the engines failed: {error}")
    faster = Engine.MPIO if probed.mpio_s < probed.direct_s else Engine.DIRECT
    return choice(faster, f"{', '.join(shared)}: {probed.describe(num_ranks=comm.num_ranks)}")


def _described(obstacles: Sequence[str | None], *, comm: Collective) -> str | None:
    """Returns a text that says which ranks cannot use MPI-IO and why, or None if all ranks can.

    `obstacles` contains, for each rank, the reason why it cannot use MPI-IO, or None.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for place, text in enumerate(obstacles):
        if text is not None:
            ranks_by_text.setdefault(text, []).append(comm.members[place])
    if len(ranks_by_text) == 1 and None not in obstacles:
        return next(iter(ranks_by_text))
    return "; ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()) or None
