"""A rank whose buffer has another length or dtype: every rank hears which one it is, long before the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import comm_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


@pytest.mark.parametrize(("backend", "num_ranks"), [("mpi", 2), ("mpi", 4), ("horovod", 3)])
def test_a_rank_with_another_buffer_is_named_on_every_rank(backend: str, num_ranks: int) -> None:
    result = run_ranks(num_ranks, comm_cases.different_buffers_in_turn, None, backend=backend)
    assert len({len(told) for told in result.outputs}) == 1
    for told in result.outputs:
        *errors, after = told
        assert len(errors) == (11 if backend == "mpi" else 6)
        for text in errors:
            assert ": BufferMismatch True in time" in text
            assert "must be the same on every rank" in text
            # Of two that differ nobody can say which one is wrong: rank 1 is then told after rank 0.
            assert "but rank 1 " in text
        assert after == f"{num_ranks}"


def test_a_rank_with_an_empty_buffer_over_horovod_is_named_by_the_watcher(tmp_path: Path) -> None:
    result = run_ranks(
        3, comm_cases.one_rank_brings_nothing, str(tmp_path), backend="horovod", expect=6, timeout_s=60
    )
    assert "rank 1" in result.stderr
    assert result.wall_s < 20
