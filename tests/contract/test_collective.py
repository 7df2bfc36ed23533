"""One contract for all backends: each case at 1, 2, 3 and 4 ranks. One launch runs all cases."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

from tests.contract import collective_cases
from tests.ranks_launcher import run_ranks

LAUNCHES = [
    ("serial", 1),
    *((backend, n) for backend in ("threads", "mpi", "horovod") for n in (1, 2, 3, 4)),
]


@functools.cache
def launch(backend: str, num_ranks: int) -> list[Any]:
    return run_ranks(num_ranks, collective_cases.run_all, backend=backend, timeout_s=120).outputs


@pytest.mark.launches
@pytest.mark.parametrize("case", collective_cases.all_cases())
@pytest.mark.parametrize(("backend", "num_ranks"), LAUNCHES)
def test_contract(backend: str, num_ranks: int, case: str) -> None:
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: hpctrain runs without it")
    failures = {rank: found[case] for rank, found in enumerate(launch(backend, num_ranks)) if found[case]}
    assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
