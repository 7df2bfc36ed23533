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


def test_who_is_ended_because_of_another_is_no_cause() -> None:
    """Then the launcher's own code counts, unless it is that of ranks that were killed."""
    first = FirstFailure()
    for line in (b"srun: Job step aborted: Waiting up to 7 seconds", b"srun: error: hpct0: task 0: Killed"):
        first.saw(line)
    assert not first.is_cause
    first.saw(b"srun: error: hpct0: task 1: Exited with exit code 3")
    assert first.is_cause
