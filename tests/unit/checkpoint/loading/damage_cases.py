"""Whether a changed checkpoint is loaded as good."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint import load
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import CheckpointError


def is_loaded(path: Path) -> bool:
    try:
        load(path, comm=SerialWorld())
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
        return False
    return True
