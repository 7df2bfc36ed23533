"""Which rank failed first, by what is printed at the end of a step."""

from __future__ import annotations

import pytest

from hpctrain.launch.failure import FirstFailure
from tests.unit.launch.srun_endings import ENDINGS


@pytest.mark.parametrize("name", ENDINGS)
def test_the_rank_that_failed_first_gives_the_code(name: str) -> None:
    first = FirstFailure()
    for line in ENDINGS[name].lines:
        first.saw(line.encode())
    assert first.failure is not None
    assert first.failure.exit_code == ENDINGS[name].right
