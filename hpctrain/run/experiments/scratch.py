"""A folder for the checkpoints of a check, removed afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.comm import Collective, make_shared_folder, on_rank_0


@contextmanager
def scratch_folder(parent: Path, *, comm: Collective) -> Iterator[Path]:
    """Makes a folder in `parent`, which all nodes see, and removes it after the block. Collective."""
    made = on_rank_0(comm, lambda: tempfile.mkdtemp(prefix=".hpctrain-check-", dir=parent))
    folder = Path(made)
    make_shared_folder(folder, comm=comm)
    try:
        yield folder
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
