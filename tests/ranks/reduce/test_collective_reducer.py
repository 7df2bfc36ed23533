"""Buckets summed by the collective operations of real backends."""

from __future__ import annotations

import importlib.util

import pytest

from tests import reducer_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)


@pytest.mark.parametrize("backend", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_every_algorithm_and_wire_sums_within_its_bound_and_every_rank_hears_of_another_plan(
    backend: str,
) -> None:
    texts = run_ranks(3, reducer_cases.all_sums_and_another_plan, backend=backend).outputs
    assert len(set(texts)) == 1
    assert "but rank 2" in texts[0]
