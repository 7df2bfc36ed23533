"""A rank whose buffer has another length or dtype: every rank hears which one it is, long before the limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.board.node_files import read_ending
from tests.ranks.comm import comm_cases, model_mismatch_cases
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.cold]


@pytest.mark.parametrize(
    ("backend", "num_ranks"), [("mpi", 2), pytest.param("mpi", 4, marks=pytest.mark.thorough), ("horovod", 3)]
)
def test_a_rank_with_another_buffer_is_named_on_every_rank(backend: str, num_ranks: int) -> None:
    result = run_ranks(num_ranks, comm_cases.different_buffers_in_turn, None, backend=backend)
    assert len({len(reported) for reported in result.outputs}) == 1
    for reported in result.outputs:
        *errors, after = reported
        assert len(errors) == (14 if backend == "mpi" else 10)
        for text in errors:
            assert ": BufferMismatch True in time" in text
            assert "must be the same on every rank" in text
            # Of two that differ nobody can say which one is wrong: rank 1 is then told after rank 0.
            assert "but rank 1 " in text
        assert after == f"{num_ranks}"


@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_a_rank_with_another_model_is_named_on_every_rank(backend: str) -> None:
    cases = model_mismatch_cases
    result = run_ranks(3, cases.models_that_differ, backend=backend)
    assert result.outputs == [result.outputs[0]] * 3
    reported = result.outputs[0]
    assert len(reported) == len(cases.ALGORITHMS) * len((*cases.MODELS, *cases.TRAINED)) + 2
    for name, text in reported.items():
        algorithm, _, kind = name.partition(", ")
        what, first = "the arguments of operation", ""
        if kind == "another number of sums" and algorithm == "flat" and backend == "horovod":
            what = "how many numbers a step sums"  # they travel with Horovod's buckets
        elif kind in cases.MODELS:
            what = "the model"
        elif kind == "another dtype is trained":  # an optimizer of another model's parameters
            what, first = "parameters outside the model", "no tensors"
        elif kind in cases.TRAINED:
            what, first = "the plan of gradient buckets", "" if algorithm == "auto" else algorithm
        assert text.startswith(f"BufferMismatch True in time {what}"), f"{name}: {text}"
        assert f'must be the same on every rank: ranks 0, 2 "{first}'.rstrip('"') in text, f"{name}: {text}"
        assert "but rank 1 " in text, f"{name}: {text}"


def test_a_rank_in_another_operation_over_horovod_is_named_by_every_ranks_watcher(tmp_path: Path) -> None:
    case = comm_cases.one_rank_is_in_another_operation
    result = run_ranks(3, case, str(tmp_path), backend="horovod", expect=6, timeout_s=300)
    ending = read_ending(tmp_path)
    assert ending is not None
    assert ending.leave_at - (tmp_path / "began").stat().st_mtime < 10
    for rank in range(3):
        reported = (
            rf"rank {rank} on \S+ ends .*: ranks called number \d+ of world with different arguments: rank 1 "
        )
        assert re.search(
            reported + r"(on \S+ )?has broadcast .*, where 2 of 3 have all_reduce ", result.stderr
        )


def test_a_longer_buffer_that_horovod_takes_in_pieces_meets_nothing_else(tmp_path: Path) -> None:
    case = comm_cases.one_rank_has_a_longer_buffer_in_pieces
    result = run_ranks(3, case, str(tmp_path), backend="horovod", expect=6, timeout_s=300)
    assert "did not come: rank 1\n" in result.stderr
