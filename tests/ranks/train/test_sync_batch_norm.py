"""Batch normalisation over real backends, beside a thread that reduces."""

from __future__ import annotations

import importlib.util

import pytest

from tests import sync_batch_norm_cases
from tests.ranks_launcher import run_ranks

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)


@pytest.mark.launches
@pytest.mark.parametrize(
    "backend", [pytest.param("mpi", marks=pytest.mark.thorough), pytest.param("horovod", marks=needs_horovod)]
)
def test_many_ranks_train_as_one_does(backend: str) -> None:
    found = run_ranks(3, sync_batch_norm_cases.beside_reductions, backend=backend).outputs
    assert max(found) < 1e-10
