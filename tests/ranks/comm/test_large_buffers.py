"""Buffers whose bytes, or elements, are more than 2^31: a signed 32-bit count, such as MPI's, cannot hold them."""

from __future__ import annotations

import importlib.util
import shutil

import psutil
import pytest

from tests.ranks.comm import large_buffer_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)
# A little more than 2^31, and not a multiple of anything that work is cut into.
MANY = 2**31 + 12_345_677
NUM_RANKS = 2
CASES = [["ring", "fp32", "ab"], ["direct", "int8", "ab"], ["hierarchical", "fp32", "aa"]]


def needs_memory(num_bytes: float, *, shared: bool = False) -> None:
    free = psutil.virtual_memory().available
    if shared:
        free = min(free, shutil.disk_usage("/dev/shm").free)
    if free < num_bytes:
        pytest.skip(f"{num_bytes / 2**30:.0f} GiB of memory are needed, {free / 2**30:.0f} GiB are free")


def test_more_than_2_to_the_31_bytes() -> None:
    needs_memory(NUM_RANKS * 2.5 * MANY, shared=True)
    run_ranks(
        NUM_RANKS, large_buffer_cases.sums, CASES, MANY // 4 + 1, "float32", backend="mpi", timeout_s=800
    )


@pytest.mark.thorough  # half a minute
def test_more_than_2_to_the_31_elements() -> None:
    """In the fewest bytes that show it: the buckets of training are float32 or float64, and these float16."""
    needs_memory(NUM_RANKS * 3 * MANY)
    cases = [["ring", "fp16", "ab"], ["direct", "fp16", "ab"]]
    run_ranks(NUM_RANKS, large_buffer_cases.sums, cases, MANY, "float16", backend="mpi", timeout_s=800)


# Horovod in small pieces: test_backends.py.
@pytest.mark.parametrize(
    "backend", ["mpi", pytest.param("horovod", marks=[needs_horovod, pytest.mark.thorough])]
)
def test_a_backend_sums_more_than_2_to_the_31_elements(backend: str) -> None:
    needs_memory(NUM_RANKS * 2.5 * MANY)
    run_ranks(NUM_RANKS, large_buffer_cases.all_reduced, MANY, backend=backend, timeout_s=800)
