"""Which engine writes: asked for, or chosen by what every rank has. The choice is agreed by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hpctrain.checkpoint.mpio_engine import obstacle_to_mpio, write_together
from hpctrain.checkpoint.write_direct import write_direct
from hpctrain.comm.agreement import all_gather_json, describe_ranks
from hpctrain.comm.communicator import Collective
from hpctrain.errors import CheckpointError, UsageError


class Engine(str, Enum):
    """How the bytes reach the file; the file's content is the same."""

    AUTO = "auto"
    DIRECT = "direct"
    MPIO = "mpio"


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """engine: DIRECT or MPIO. note: why."""

    engine: Engine
    note: str

    def write(
        self,
        path: Path,
        stretches: Iterable[tuple[int, memoryview]],
        *,
        comm: Collective,
        members: Sequence[int],
        limit_bytes_per_s: float | None = None,
    ) -> None:
        """Write this rank's stretches, (offset, bytes), of the file at `path`, which is there. On disk when it
        returns. Collective over the world ranks `members` with MPIO, not at all with DIRECT. CheckpointError."""
        if self.engine is Engine.MPIO:
            write_together(path, stretches, comm=comm, members=members)
        else:
            write_direct(path, stretches, limit_bytes_per_s=limit_bytes_per_s)


def engine_named(name: Engine | str) -> Engine:
    """Raises UsageError for a name that is no engine."""
    try:
        return Engine(name)
    except ValueError as error:
        valid = ", ".join(engine.value for engine in Engine)
        raise UsageError(f"there is no checkpoint engine {name!r}: choose one of {valid}") from error


def choose_engine(requested: Engine, *, comm: Collective) -> EngineChoice:
    """Collective. Raises CheckpointError on every rank when MPIO is asked for and some rank cannot do it."""
    if requested is Engine.DIRECT:
        return EngineChoice(engine=Engine.DIRECT, note="asked for")
    if requested is Engine.AUTO and comm.num_ranks == 1:
        return EngineChoice(engine=Engine.DIRECT, note="one rank has nobody to share MPI-IO with")
    obstacles = all_gather_json(comm, obstacle_to_mpio(comm))
    ranks_by_text: dict[str, list[int]] = {}
    for place, text in enumerate(obstacles):
        if text is not None:
            ranks_by_text.setdefault(text, []).append(comm.members[place])
    if not ranks_by_text:
        why = "asked for" if requested is Engine.MPIO else "parallel HDF5 and MPI ranks are there"
        return EngineChoice(engine=Engine.MPIO, note=why)
    if len(ranks_by_text) == 1 and None not in obstacles:
        note = next(iter(ranks_by_text))
    else:
        note = "; ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items())
    if requested is Engine.MPIO:
        raise CheckpointError(f"the engine mpio cannot be used: {note}: use direct or auto", agreed=True)
    return EngineChoice(engine=Engine.DIRECT, note=note)
