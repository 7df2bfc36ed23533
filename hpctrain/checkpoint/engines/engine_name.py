"""Names of the engines that write a checkpoint's bytes. `engine_choice` chooses one."""

from __future__ import annotations

from enum import Enum

from hpctrain.errors import UsageError


class Engine(str, Enum):
    """How the bytes of a checkpoint are written to its files. Every engine writes the same content.

    DIRECT: each rank writes its own bytes with pwrite. MPIO: the ranks write together through MPI-IO. AUTO: DIRECT or
    MPIO, whichever suits the filesystem (see `choose_engine`).
    """

    AUTO = "auto"
    DIRECT = "direct"
    MPIO = "mpio"


def engine_named(name: Engine | str) -> Engine:
    """Returns the engine of that name. Raises UsageError for an unknown name."""
    try:
        return Engine(name)
    except ValueError as error:
        valid = ", ".join(engine.value for engine in Engine)
        raise UsageError(f"there is no checkpoint engine {name!r}: choose one of {valid}") from error
