"""One contract for all backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.comm import World
from hpctrain.testing import CollectiveContract
from tests.ranks_launcher import run_ranks


class _Launched(CollectiveContract):
    backend = ""

    def run_ranks(self, num_ranks: int, function: Callable[[World], Any]) -> list[Any]:
        return run_ranks(num_ranks, function, backend=self.backend, timeout_s=800).outputs


@pytest.mark.launches
class TestSerial(_Launched):
    backend = "serial"
    num_ranks_tested = (1,)


@pytest.mark.launches
class TestThreads(_Launched):
    backend = "threads"


@pytest.mark.launches
class TestMpi(_Launched):
    backend = "mpi"


@pytest.mark.launches
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="hpctrain runs without Horovod")
class TestHorovod(_Launched):
    """With two ranks and three: tests/ranks/comm/test_backends.py."""

    backend = "horovod"
    num_ranks_tested = (1, 4)
