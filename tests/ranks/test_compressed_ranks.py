"""Low-rank and top-k reduction over every backend of real processes, against ranks as threads."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks import compressed_cases
from tests.ranks_launcher import run_ranks
from tests.unit.bucket_steps import on_ranks

pytestmark = pytest.mark.launches
NUM_RANKS = 3
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)


@pytest.mark.parametrize("backend", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_all_ranks_get_the_same_bits_and_the_sums_that_threads_get(backend: str) -> None:
    found = run_ranks(NUM_RANKS, compressed_cases.sums_of_both, backend=backend).outputs
    assert all(other == found[0] for other in found[1:])
    on_threads = on_ranks(NUM_RANKS, compressed_cases.sums_of_both)[0]
    for name, expected in on_threads.items():
        assert found[0][name]["norm"] == pytest.approx(expected["norm"], rel=1e-4)
