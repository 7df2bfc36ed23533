"""Messages between two ranks that are longer than MPI's 32-bit counts, or a lowered limit, allow."""

from __future__ import annotations

import pytest

from tests.ranks.comm import message_cases
from tests.ranks.comm.test_large_buffers import needs_memory
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


def test_long_messages_are_sent_in_pieces_that_do_not_mix() -> None:
    run_ranks(3, message_cases.in_pieces, backend="mpi", timeout_s=300)


@pytest.mark.thorough  # 9 GB of memory
def test_a_process_group_sends_more_than_2_to_the_31_bytes() -> None:
    needs_memory(9 * 2**30)
    run_ranks(2, message_cases.over_two_gib, backend="mpi", timeout_s=800)
