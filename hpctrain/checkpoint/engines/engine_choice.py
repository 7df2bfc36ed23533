"""Chooses the engine: as requested, or by the filesystem and the MPI support of the ranks. The same on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.engines.engine_probe import probe
from hpctrain.checkpoint.engines.mpio_engine import (
    HINTS,
    files_of,
    obstacle_to_mpio,
    own_group,
    write_together,
)
from hpctrain.checkpoint.engines.posix_engine import write_direct
from hpctrain.checkpoint.engines.write_batch import ByteRange, paced
from hpctrain.checkpoint.files.lustre_striping import alignment_of, stripes_for
from hpctrain.checkpoint.files.write_buffers import Staging
from hpctrain.comm import Collective, all_gather_json, describe_ranks, on_rank_0
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.storage import Filesystem, filesystem_of


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """engine: DIRECT or MPIO. note: the reason. filesystem: that of the directory on rank 0."""

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
        """Writes this rank's byte ranges, (offset, bytes), to the existing file at `path` and flushes them to disk.

        Collective with MPIO (see `write_together`), not collective with DIRECT.
        byte_ranges: the content. structure: further byte ranges, which the leader of the file soon reads back.
        groups: see `write_together`. bypass_cache, staging: for DIRECT, see `write_direct`. limit_bytes_per_s: maximum
        write rate of this rank, in bytes/s. Raises CheckpointError only on ranks that fail: the caller must exchange
        the outcome.
        """
        if limit_bytes_per_s is not None:
            structure = paced(structure, limit_bytes_per_s=limit_bytes_per_s)
            byte_ranges = paced(byte_ranges, limit_bytes_per_s=limit_bytes_per_s)
        if self.engine is Engine.MPIO:
            hints = dict(HINTS)
            if self.filesystem.is_lustre:
                num_ranks = len(own_group(comm, groups=groups))
                hints.update(stripes_for(_size_of(path)).hints(num_ranks=num_ranks))
            write_together(
                path, itertools.chain(structure, byte_ranges), comm=comm, groups=groups, hints=hints,
                block_bytes=alignment_of(self.filesystem),
            )  # fmt: skip
        else:
            write_direct(path, byte_ranges, structure=structure, bypass_cache=bypass_cache, staging=staging)


def _size_of(path: Path) -> int:
    """Returns the length of a file in bytes; 0 on an error, which opening the file then raises."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# Cached choices by communicator object. All ranks of a communicator have the same entries.
_chosen: WeakKeyDictionary[Collective, dict[tuple[Engine, str, bool], EngineChoice]] = WeakKeyDictionary()


def choose_engine(
    requested: Engine, *, directory: Path, comm: Collective, in_background: bool = False
) -> EngineChoice:
    """Returns the engine for checkpoints in `directory`. Collective; cached for `comm` and `directory`.

    AUTO chooses DIRECT on local filesystems and for one rank; elsewhere the faster one, which is measured once.
    in_background: another thread writes, which must not communicate, so only DIRECT is possible.
    Raises on every rank if MPIO is requested and not possible: UsageError in the background, CheckpointError if a rank
    does not support it.
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
    """Returns the ranks' obstacles as one text; None if there is none."""
    ranks_by_text: dict[str, list[int]] = {}
    for place, text in enumerate(obstacles):
        if text is not None:
            ranks_by_text.setdefault(text, []).append(comm.members[place])
    if len(ranks_by_text) == 1 and None not in obstacles:
        return next(iter(ranks_by_text))
    return "; ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()) or None
