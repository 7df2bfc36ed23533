"""Names of the engines. See `engine_choice` for how one is chosen."""

from __future__ import annotations

from enum import Enum

from hpctrain.errors import UsageError


class Engine(str, Enum):
    """How the bytes are written to the file. The content of the file does not depend on it."""

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
