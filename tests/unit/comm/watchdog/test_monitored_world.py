"""The deadline over ranks that are threads: what it says of who is missing."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest

from hpctrain.comm import Monitored, World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.watchdog import monitored_world
from hpctrain.errors import CommunicationError
from hpctrain.topology import Topology


def report(capfd: pytest.CaptureFixture[str], directory: Path | None) -> str:
    """What is said when rank 1 of 2 does not come to a split."""
    over = threading.Event()

    def rank(world: World) -> None:
        monitored = Monitored(world, timeout_s=0.6, directory=directory)
        monitored.barrier()
        if world.rank == 1:
            over.wait(300)
        try:
            monitored.split([[0]])
        finally:
            over.set()

    with pytest.raises(CommunicationError, match="rank 0 ended the run with exit code 6"):
        run_threads(2, rank, timeout_s=300)
    return capfd.readouterr().err


@pytest.mark.timing
def test_a_rank_missing_at_a_split_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = report(capfd, tmp_path / "made" / "here")
    assert "rank 0 on" in text
    late = re.search(r"for split number (\d+) of world", text)
    assert late is not None
    assert "did not come: rank 1\n" in text
    assert f"has finished barrier number {int(late[1]) - 1}" in text
    assert "other ranks wait for rank 1" in text
    assert "over.wait" not in text  # stacks name files and functions
    assert "in rank" in text
    here = Path(__file__).name
    assert re.search(rf"  rank 1 is at threading.py:\d+ wait < {here}:\d+ rank < ", text)


@pytest.mark.timing
def test_without_a_directory_the_run_ends_and_says_what_it_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    assert "which rank did not come is not known: the ranks share no directory" in report(capfd, None)


@pytest.mark.parametrize("emulated", [False, True])
def test_one_rank_of_each_node_writes_at_the_start_and_the_last_one_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulated: bool
) -> None:
    here = threading.local()
    if not emulated:
        monkeypatch.setattr(socket, "gethostname", lambda: "aab"[here.rank])
    parent = tmp_path / "memory"
    parent.mkdir()
    monkeypatch.setattr(monitored_world, "local_parent", lambda: parent)

    def rank(world: World) -> tuple[list[str], list[str]]:
        here.rank = world.rank
        monitored = Monitored(world, timeout_s=300)
        if emulated:
            monitored.place(Topology.from_node_names(["here/0", "here/0", "here/1"], emulated=True))
        monitored.publish_in(tmp_path / "watch")
        found = [
            sorted(
                re.sub("-[0-9a-f]{16}-", "-", str(path.relative_to(folder)))
                for path in folder.rglob("*.json")
            )
            for folder in (tmp_path / "watch", parent)
        ]
        monitored.barrier()
        monitored.close()
        return found[0], found[1]

    shared = ["nodes-0/node-0.json", "nodes-0/node-1.json"]
    local = [f"hpctrain-watch-{leader}/rank-{rank}.json" for leader, rank in ((0, 0), (0, 1), (2, 2))]
    assert run_threads(3, rank, timeout_s=300) == [(shared, local)] * 3
    assert list(parent.iterdir()) == []


def test_results_pass_through_unchanged(tmp_path: Path) -> None:
    def rank(world: World) -> list[list[bytes]]:
        monitored = Monitored(world, timeout_s=300, directory=tmp_path)
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
