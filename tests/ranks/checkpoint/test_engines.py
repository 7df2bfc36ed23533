"""Engines of checkpoints under real mpirun: the same bytes from both, errors on all ranks, and the choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.checkpoint.engine_cases import engines_of_every_size
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


@pytest.mark.parametrize(("num_ranks", "backend"), [(4, "mpi"), (2, "horovod")])
def test_both_engines_write_the_same_bytes_and_every_rank_hears_of_an_error(
    tmp_path: Path, num_ranks: int, backend: str
) -> None:
    outputs = run_ranks(num_ranks, engines_of_every_size, str(tmp_path), backend=backend).outputs
    for output in outputs:
        assert output["wrong"] == []
        assert output["errors"] == outputs[0]["errors"]
        assert output["choices"] == outputs[0]["choices"]
        saved = output["saved"]
        assert saved["direct 1"] == saved["mpio 1"]
        assert saved["direct 2"] == saved["mpio 2"]
        assert saved["direct 3"] == saved["mpio 3"]
        assert (len(saved["direct 1"]), len(saved["direct 2"])) == (1, 2)
    errors, choices = outputs[0]["errors"], outputs[0]["choices"]
    assert errors["source"].startswith(f"CheckpointError: rank {num_ranks - 1} (")
    assert errors["source"].endswith("): the device is gone")
    assert "does every node see this directory?" in errors["missing"]
    assert "File too large (a limit on file sizes is set" in errors["too large"]
    assert errors["after all"] == "nothing"
    for engine in ("direct", "mpio"):
        reported = errors[f"replica, {engine}"]
        assert reported.startswith("CheckpointError: the ranks' replicated tensors differ: ")
        assert "t0" in reported
        assert reported.endswith("; left: ['step-00000001.h5']")
        assert errors[f"changed, {engine}"] == "[]; left: 3"

    assert choices["direct"] == ["direct", "requested"]
    assert choices["mpio"] == ["mpio", "requested"]
    assert choices["auto"][0] == "direct"
    assert choices["remembered"]
    engine, note = choices["shared"]
    assert engine in ("direct", "mpio")
    assert "nfs4: " in note
    assert " MB/s direct, " in note
    assert choices["background"] == ["direct", "a background thread cannot use MPI-IO"]
    assert choices["left behind"] == []
