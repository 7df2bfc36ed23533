"""A finished run of two ranks, the second of them slow, and the same while it goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.unit.report.conftest import train

RECORDS = [Path("metrics", f"rank-{rank:05}.jsonl") for rank in (0, 1)]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("top")
    pack_arrays(where / "data", {"x": np.ones((96, 4), np.float32)})
    return train(where, num_ranks=2)


@pytest.fixture
def going_on(finished: Path, tmp_path: Path) -> Path:
    """The run directory as it was before the first step was recorded."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "summary.json").unlink()
    for path in RECORDS:
        (run / path).write_text("")
    os.utime(run / "starts.jsonl")
    return run


def lines_of(finished: Path, rank: int) -> list[str]:
    """Returns the lines that a rank recorded."""
    return (finished / RECORDS[rank]).read_text().splitlines(keepends=True)
