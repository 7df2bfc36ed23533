"""Loading under real mpirun: the ranks of a node share what they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.checkpoint import load_cases as cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


def test_ranks_of_a_node_read_a_part_each(tmp_path: Path) -> None:
    result = run_ranks(3, cases.share_and_load, str(tmp_path), backend="mpi")
    for found, num_sharing in zip(result.outputs, (2, 2, 1), strict=True):
        assert 1 / num_sharing - 0.2 <= found["node"] <= 1 / num_sharing + 0.2  # whole extents of 4 MiB
        assert 1.0 <= found["none"] < 1.1
