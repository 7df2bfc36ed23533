"""The deadline over ranks that are threads: what it says of who is missing."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from hpctrain.comm import Monitored, World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import CommunicationError


def report(capfd: pytest.CaptureFixture[str], directory: Path | None) -> str:
    """What is said when rank 1 of 2 does not come to a split."""
    over = threading.Event()

    def rank(world: World) -> None:
        monitored = Monitored(world, timeout_s=0.6, directory=directory)
        monitored.barrier()
        if world.rank == 1:
            over.wait(20)
        try:
            monitored.split([[0]])
        finally:
            over.set()

    with pytest.raises(CommunicationError, match="rank 0 ended the run with exit code 6"):
        run_threads(2, rank, timeout_s=30)
    return capfd.readouterr().err


def test_a_rank_missing_at_a_split_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = report(capfd, tmp_path / "made" / "here")
    assert "rank 0 on" in text
    late = re.search(r"for split number (\d+) of world", text)
    assert late is not None
    assert "did not come: rank 1\n" in text
    assert f"is past barrier number {int(late[1]) - 1}" in text
    assert "other ranks wait for rank 1" in text
    assert "over.wait" not in text  # stacks name files and functions
    assert "in rank" in text


def test_without_a_directory_the_run_ends_and_says_what_it_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    assert "which rank did not come is not known: no directory" in report(capfd, None)


def test_results_pass_through_unchanged(tmp_path: Path) -> None:
    def rank(world: World) -> list[list[bytes]]:
        monitored = Monitored(world, timeout_s=20, directory=tmp_path)
        assert isinstance(monitored, World)
        group = monitored.split([[2, 0]])
        duplicate = monitored.duplicate()
        assert (duplicate.members, duplicate.backend) == ((0, 1, 2), "threads")
        found = [duplicate.all_gather_bytes(bytes([world.rank]))]
        if group is not None:
            found.append(group.all_gather_bytes(bytes([world.rank])))
        monitored.close()
        return found

    everyone = [b"\0", b"\1", b"\2"]
    pair = [b"\2", b"\0"]
    assert run_threads(3, rank) == [[everyone, pair], [everyone], [everyone, pair]]
