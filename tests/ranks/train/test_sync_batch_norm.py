"""Batch normalisation on real ranks, beside a thread that reduces."""

from __future__ import annotations

import pytest

from tests import sync_batch_norm_cases
from tests.ranks_launcher import run_ranks


@pytest.mark.launches
def test_many_ranks_train_as_one_does() -> None:
    found = run_ranks(3, sync_batch_norm_cases.beside_reductions).outputs
    assert max(found) < 1e-10
