"""What `benchmarks.growth` counts of a run of four ranks, which no time decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.growth.measure import build_counter, measure
from benchmarks.growth.suite import growth_records
from tests.faults.checkpoint.mounts import why_not

pytestmark = pytest.mark.launches


@pytest.mark.thorough
def test_between_saves_nothing_is_looked_up_on_the_shared_filesystem(tmp_path: Path) -> None:
    """But for checkpoints, metrics, and rank 0's look whether a checkpoint is requested."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    (tmp_path / "run").mkdir()
    seen = measure(4, backend="mpi", directory=tmp_path / "run", library=build_counter(tmp_path), hangs=False)
    records = {record.id: record for record in growth_records("mpi", [seen])}
    assert records["growth.mpi.steady"].holds, records["growth.mpi.steady"].samples
    assert seen.received > 0
    assert seen.resident > seen.bare > 0
