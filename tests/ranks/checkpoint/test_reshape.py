"""What threads saved is loaded by processes, and the other way round. All numbers of ranks: tests/unit/checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.backends.threads_world import run_threads
from tests.ranks.checkpoint import reshape_cases as cases
from tests.ranks_launcher import run_ranks
from tests.unit.checkpoint.states import save_by_threads

pytestmark = [pytest.mark.launches, pytest.mark.cold]


def test_processes_load_what_threads_saved_and_the_other_way_round(tmp_path: Path) -> None:
    saved = [
        path
        for num_ranks, num_files in ((1, 1), (5, 3), (8, 4))
        for path in save_by_threads(tmp_path / "threads", num_ranks=num_ranks, files=[num_files])
    ]
    processes = tmp_path / "processes"
    result = run_ranks(3, cases.load_and_save, [str(path) for path in saved], str(processes))
    assert result.outputs == [{"loaded": 3, "saved": 4}] * 3

    def load_theirs(world: Any) -> int:
        return cases.load_all(world, [str(path) for path in sorted(processes.glob("*/step-*"))])

    assert run_threads(2, load_theirs, timeout_s=800) == [4, 4]
