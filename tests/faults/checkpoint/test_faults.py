"""Saves under mpirun that fail on one rank or for all, and jobs that are killed: with both engines."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.checkpoint import load_newest_good, save
from hpctrain.checkpoint.files.checkpoint_names import partial_files
from hpctrain.comm.backends.serial_world import SerialWorld
from tests.faults.checkpoint import cases as cases
from tests.ranks_launcher import REPOSITORY, run_ranks, start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches

ENGINES = ["direct", "mpio"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small filesystem")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small filesystem: {mounted.stderr}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_one_rank_that_cannot_write_fails_all_ranks_and_older_checkpoints_stay(tmp_path: Path) -> None:
    for directory in (tmp_path, *list(tmp_path.parents)[:2]):  # pytest's own are closed to other users
        directory.chmod(0o755)
    place = tmp_path / "checkpoints"
    place.mkdir()
    result = run_ranks(2, cases.one_rank_cannot_write, str(place), ENGINES)
    assert result.outputs[0] == result.outputs[1]
    for found in result.outputs[0].values():
        assert "rank 1" in found["limit"]
        assert "cannot write" in found["limit"]
        assert "is a file, not a directory" in found["file"]
        if os.geteuid() == 0:
            assert "Permission denied (give this user" in found["permission on rank 0"]
            assert "rank 1" in found["permission on rank 1"]
            assert "Permission denied (give this user" in found["permission on rank 1"]
    direct = result.outputs[0]["direct"]
    assert "File too large (a limit on file sizes is set" in direct["limit"]
    if os.geteuid() == 0:
        assert "rank 1" in direct["unmounted"]
        assert "does every node see this directory?" in direct["unmounted"]


@needs_root
def test_a_full_disk_fails_all_ranks_and_older_checkpoints_stay(small_disk: Path) -> None:
    result = run_ranks(2, cases.the_disk_is_full, str(small_disk / "checkpoints"), ENGINES)
    assert all("cannot" in text for text in result.outputs[0].values())
    assert "No space left on device (free some space" in result.outputs[0]["direct"]


@pytest.mark.parametrize(("engine", "victims"), [("direct", "all"), ("mpio", "one")])
def test_a_killed_job_leaves_the_newest_reported_checkpoint_whole(
    tmp_path: Path, engine: str, victims: str
) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    program = (
        "import sys; from hpctrain.comm.backends.mpi_world import MpiWorld; "
        "from tests.faults.checkpoint.cases import save_until_killed; "
        f"save_until_killed(MpiWorld.open(), {str(directory)!r}, {engine!r})"
    )
    reported = tmp_path / "reported"
    choose = random.Random(f"{engine} {victims}")
    with start_command(2, [sys.executable, "-c", program], cwd=REPOSITORY) as job:
        wait_for(lambda: reported.exists() and int(reported.read_text()) >= 2, launched=job, every_s=0.01)
        time.sleep(choose.uniform(0, 0.3))
        ranks = job.rank_processes()
        assert set(ranks) == {0, 1}
        for pid in list(ranks.values())[: 1 if victims == "one" else 2]:
            os.kill(pid, signal.SIGKILL)
        assert job.wait(timeout_s=300).returncode != 0
    newest = int(reported.read_text())
    restored = load_newest_good(directory, comm=SerialWorld())
    assert restored is not None
    assert not restored.rejected
    assert restored.checkpoint.step in (newest, newest + 1)
    save(cases.state_at(1), directory=directory, step=newest + 2, comm=SerialWorld())
    assert not partial_files(directory)
