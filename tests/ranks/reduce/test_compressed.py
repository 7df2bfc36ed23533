"""Low-rank and top-k reduction over every backend of real processes, against ranks as threads."""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import pytest

from hpctrain.reduce.wire_formats import SPARSE_WIRES
from tests.ranks.reduce import compressed_cases
from tests.ranks_launcher import run_ranks
from tests.unit.reduce.bucket_steps import on_ranks

pytestmark = pytest.mark.launches
NUM_RANKS = 3
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)


BACKENDS = ["mpi", pytest.param("horovod", marks=needs_horovod)]
# Of numbers in float64 that are added up some hundred times, over the largest sum.
ROUNDING = 1e-13


@functools.cache
def launched(backend: str) -> list[dict[str, Any]]:
    return run_ranks(NUM_RANKS, compressed_cases.both, backend=backend).outputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_get_the_same_bits_and_the_sums_that_threads_get(backend: str) -> None:
    found = [output["bits"] for output in launched(backend)]
    assert all(other == found[0] for other in found[1:])
    on_threads = on_ranks(NUM_RANKS, compressed_cases.sums_of_both)[0]
    for name, expected in on_threads.items():
        assert found[0][name]["norm"] == pytest.approx(expected["norm"], rel=1e-4)


@pytest.mark.parametrize("wire", SPARSE_WIRES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_delivered_and_what_the_ranks_keep_back_is_the_sum_of_float64(
    backend: str, wire: str
) -> None:
    for output in launched(backend):
        found = output["made"][wire]
        assert found["ran"] == "flat"
        assert found["whole"] < ROUNDING  # the first steps keep nothing back
        assert found["with_kept"] < ROUNDING
        assert found["kept"] > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_largest_values_and_only_thin_factors_travel(backend: str) -> None:
    for output in launched(backend):
        top_k, low_rank = output["made"]["top-k"], output["made"]["low-rank"]
        picked = math.ceil(0.01 * top_k["of_values"])
        assert picked <= top_k["values"] <= NUM_RANKS * picked
        assert low_rank["ranks"] == [16, 16]
        for found, most in ((top_k, 0.1), (low_rank, 0.55)):
            assert found["bytes"][0] == found["whole_bytes"][0] == 0  # what follows is on its node
            assert all(
                0 < few < most * many
                for few, many in zip(found["bytes"][1:], found["whole_bytes"][1:], strict=True)
            )
