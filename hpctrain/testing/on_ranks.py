"""Test classes whose subclasses say on how many ranks they run."""

from __future__ import annotations

from typing import Any, ClassVar


class OnRanks:
    """Every test with an argument `num_ranks` runs once for each number in `num_ranks_tested`."""

    num_ranks_tested: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest."""
        if "num_ranks" in metafunc.fixturenames:
            metafunc.parametrize("num_ranks", self.num_ranks_tested)
