"""How Hydra's words on a rank that a signal has ended are read. With real ranks: `make mpis`."""

from __future__ import annotations

import os

import pytest

from hpctrain.launch.failure import RankFailure
from hpctrain.launch.hydra_ranks import HydraRanks

MPICH = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 6287 RUNNING AT node-7
=   EXIT CODE: 7
=   CLEANING UP REMAINING PROCESSES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Terminated (signal 15)
"""
INTEL = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 0 PID 19799 RUNNING AT node-7
=   KILLED BY SIGNAL: 11 (Segmentation fault)
"""
EXITED = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 6287 RUNNING AT node-7
=   EXIT CODE: 3
=   CLEANING UP REMAINING PROCESSES
"""


@pytest.mark.parametrize(
    ("said", "process", "number"), [(MPICH, 6287, 7), (INTEL, 19799, 11), (EXITED, None, None)]
)
def test_a_rank_that_a_signal_ended_is_found_in_what_hydra_says(
    said: str, process: int | None, number: int | None
) -> None:
    ranks = HydraRanks(os.getpid(), num_ranks=2)
    found = [
        failure for line in said.encode().splitlines() if (failure := ranks.find_failure(line)) is not None
    ]
    assert ranks.send(0) == 0  # this process has started no ranks
    ranks.close()
    expected = (
        []
        if number is None
        else [RankFailure(rank=f"of process {process}", node="node-7", exit_code=128 + number, signal=number)]
    )
    assert found == expected
