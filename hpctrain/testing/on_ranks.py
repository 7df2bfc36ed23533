"""The base class of test classes whose tests run on several numbers of ranks."""

from __future__ import annotations

from typing import Any, ClassVar


class OnRanks:
    """Runs every test that has an argument `num_ranks` once per number in `num_ranks_tested`."""

    num_ranks_tested: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Sets the values of the argument `num_ranks`. pytest calls this method."""
        if "num_ranks" in metafunc.fixturenames:
            metafunc.parametrize("num_ranks", self.num_ranks_tested)
