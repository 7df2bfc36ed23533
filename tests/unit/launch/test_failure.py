"""Which rank failed first, by what is printed at the end of a step."""

from __future__ import annotations

import pytest

from hpctrain.launch.failure import FirstFailure, find_failure
from tests.unit.launch.srun_endings import ENDINGS


@pytest.mark.parametrize("name", ENDINGS)
def test_the_rank_that_failed_first_gives_the_code(name: str) -> None:
    first = FirstFailure()
    see(first, *(line.encode() for line in ENDINGS[name].lines))
    assert first.failure is not None
    assert first.failure.exit_code == ENDINGS[name].right


def test_who_is_ended_because_of_another_is_no_cause() -> None:
    """Then the launcher's own code counts, unless it is that of ranks that were killed."""
    first = FirstFailure()
    see(first, b"srun: Job step aborted: Waiting up to 7 seconds", b"srun: error: hpct0: task 0: Killed")
    assert not first.is_cause
    see(first, b"srun: error: hpct0: task 1: Exited with exit code 3")
    assert first.is_cause


def see(first: FirstFailure, *lines: bytes) -> None:
    for before, line in zip((b"", *lines), lines, strict=False):
        first.saw(line, find_failure(line) or find_failure(before + b" " + line))
