"""The engines by name: how bytes reach a file. Which one is taken: see `engine_choice`."""

from __future__ import annotations

from enum import Enum

from hpctrain.errors import UsageError


class Engine(str, Enum):
    """How the bytes reach the file; the file's content is the same."""

    AUTO = "auto"
    DIRECT = "direct"
    MPIO = "mpio"


def engine_named(name: Engine | str) -> Engine:
    """Raises UsageError for a name that is no engine."""
    try:
        return Engine(name)
    except ValueError as error:
        valid = ", ".join(engine.value for engine in Engine)
        raise UsageError(f"there is no checkpoint engine {name!r}: choose one of {valid}") from error
