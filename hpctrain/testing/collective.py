"""Tests for a communication backend, an implementation of `hpctrain.comm.World`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.comm import World
from hpctrain.testing import collective_cases
from hpctrain.testing.on_ranks import OnRanks

_LAUNCHED: dict[tuple[type, int], list[dict[str, str | None]]] = {}


class CollectiveContract(OnRanks):
    """Tests a communication backend on 1 to 4 ranks. Implement `run_ranks`.

    For each number of ranks, the ranks are launched once, and this launch runs all test cases.
    """

    def run_ranks(self, num_ranks: int, function: Callable[[World], Any]) -> list[Any]:
        """Runs a function on several ranks of the backend.

        Args:
            num_ranks: The number of ranks to start.
            function: A function that takes the `World` of a rank.

        Returns:
            The results of the function, by rank, which are JSON values.
        """
        raise NotImplementedError

    @pytest.mark.parametrize("case", collective_cases.all_cases())
    def test_contract(self, num_ranks: int, case: str) -> None:
        key = (type(self), num_ranks)
        if key not in _LAUNCHED:
            _LAUNCHED[key] = self.run_ranks(num_ranks, collective_cases.run_all)
        failures = {rank: found[case] for rank, found in enumerate(_LAUNCHED[key]) if found[case]}
        assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
