"""The files of ranks and nodes: what is read back, what is left out, who removes them, who is the first to announce."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.board.node_files import (
    Ending,
    LocalFolder,
    NodeStatus,
    announce_ending,
    announce_from_node,
    local_folder,
    local_parent,
    make_local_folder,
    make_node_folders,
    node_path,
    position_path,
    read_ending,
    read_local,
    read_node,
    read_nodes,
    status_of_node,
    write_node,
    write_position,
)
from hpctrain.comm.watchdog.board.status_board import join_positions
from tests.unit.comm.watchdog.rank_alone import position

pytestmark = pytest.mark.timing


def test_positions_are_read_back_and_damaged_ones_left_out(tmp_path: Path) -> None:
    written = replace(position(3), reached={"h1": False})
    write_position(written, local=tmp_path)
    position_path(tmp_path, rank=4).write_text('{"rank": 4')
    position_path(tmp_path, rank=5).write_text('{"rank": 5, "groups": {"world": {"unknown": 1}}}')
    position_path(tmp_path, rank=6).write_text('{"rank": 6, "groups": [1]}')
    assert read_local(tmp_path) == {3: written}


def test_nodes_are_read_back_and_damaged_or_earlier_ones_left_out(tmp_path: Path) -> None:
    """Files of two attempts; of the later one also a rank's position that the earlier one left on its node."""
    status = NodeStatus(
        node=1, host="b", written=101.0, addresses=("10.0.0.1",), port=7, reached={"a": True},
        positions={2: position(2, written=100.5), 3: position(3, written=99.0)},
    )  # fmt: skip
    make_node_folders(tmp_path, num_nodes=4)
    write_node(status, shared=tmp_path, rank=2)
    write_node(replace(status, node=2, written=99.0), shared=tmp_path, rank=4)
    node_path(tmp_path, node=3).write_text('{"node": 3, "positions": {}}')
    assert read_node(tmp_path, node=1) == status
    found, unread = read_nodes(tmp_path, nodes=range(5), since=100.0, within_s=10)
    assert found == [replace(status, positions={2: status.positions[2]})]
    assert unread == []


def test_no_directory_holds_more_than_256_nodes(tmp_path: Path) -> None:
    make_node_folders(tmp_path, num_nodes=1250)
    for node in (0, 255, 256, 1249):
        write_node(NodeStatus(node=node, host="a", written=1.0), shared=tmp_path, rank=0)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    assert found == [
        "nodes-0/node-0.json", "nodes-0/node-255.json", "nodes-1024/node-1249.json", "nodes-256/node-256.json",
    ]  # fmt: skip


def test_a_file_that_hangs_leaves_the_others_readable(tmp_path: Path) -> None:
    make_node_folders(tmp_path, num_nodes=100)
    for node in range(100):
        write_node(NodeStatus(node=node, host="a", written=1.0), shared=tmp_path, rank=0)
    node_path(tmp_path, node=17).unlink()
    os.mkfifo(node_path(tmp_path, node=17))
    start_s = time.monotonic()
    found, unread = read_nodes(tmp_path, nodes=range(100), since=0.0, within_s=1.0)
    assert time.monotonic() - start_s < 5
    assert len(found) == 99
    assert unread == [17]


def test_what_ranks_of_a_node_have_probed_is_joined_and_old_findings_do_not_count() -> None:
    positions = {
        0: replace(position(0, written=99.0), reached={"b": False, "c": True}),
        1: replace(position(1, written=99.0), reached={"b": True}),
        2: replace(position(2, written=10.0), reached={"d": False}),
    }
    status = status_of_node(positions, node=0, host="a", now=100.0, probed_within_s=20.0)
    assert status.reached == {"b": True, "c": True}
    assert [found.reached for found in status.positions.values()] == [{}, {}, {}]


def test_silence_of_a_rank_is_by_its_nodes_clock_and_silence_of_a_node_by_the_readers() -> None:
    """The clock of node 0 is an hour behind."""
    behind = NodeStatus(
        node=0,
        host="a",
        written=-3600.0,
        positions={0: position(0, written=-3600.5), 1: position(1, written=-3640.0)},
    )
    recent = replace(behind, node=1, written=99.0, positions={2: position(2, written=59.0)})
    old = replace(recent, node=2, written=50.0)
    found = join_positions(
        [behind, recent, old], nodes=range(4), now=100.0, silent_after_s=30.0, probed_within_s=60.0
    )
    assert found.silent_nodes == {0: 3700.0, 2: 50.0, 3: None}
    assert {rank: 100.0 - known.written for rank, known in found.by_rank.items()} == {2: 40.0}
    found = join_positions([behind], nodes=[0], now=-3599.0, silent_after_s=30.0, probed_within_s=60.0)
    assert {rank: -3599.0 - known.written for rank, known in found.by_rank.items()} == {0: 0.5, 1: 40.0}


# ---- the folder of a node


def test_the_last_rank_that_leaves_removes_the_folder_of_its_node(tmp_path: Path) -> None:
    path = tmp_path / "node"
    holds = [make_local_folder(path), LocalFolder(path), LocalFolder(path)]
    write_position(position(0), local=path)
    assert path.stat().st_mode & 0o777 == 0o700
    for hold in holds[:-1]:
        hold.release()
        assert path.exists()
    holds[-1].release()
    assert not path.exists()
    holds[-1].release()


def test_the_folder_of_killed_ranks_is_removed_by_a_later_run_and_that_of_others_is_not(
    tmp_path: Path,
) -> None:
    killed, alive, young = (
        local_folder(tmp_path, run=name, leader=0) for name in ("killed", "alive", "young")
    )
    script = "import os, sys, signal\nfrom pathlib import Path\n"
    script += "from hpctrain.comm.watchdog.board.node_files import make_local_folder\n"
    script += "hold = make_local_folder(Path(sys.argv[1]))\nos.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", script, str(killed)], check=False).returncode == -9
    hold = make_local_folder(alive)
    young.mkdir()
    for path in (killed, alive):
        os.utime(path, (1.0, 1.0))
    make_local_folder(local_folder(tmp_path, run="new", leader=0)).release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hpctrain-watch-alive-0",
        "hpctrain-watch-young-0",
    ]
    hold.release()


def test_the_folder_is_in_the_nodes_memory() -> None:
    assert local_parent() == Path("/dev/shm")


# ---- the announcement


def test_the_first_rank_to_end_the_run_is_the_one_that_counts(tmp_path: Path) -> None:
    first = Ending(rank=1, host="b", written=4.0, leave_at=5.0, reason="late")
    second = Ending(rank=0, host="a", written=5.0, leave_at=6.0, reason="late too")
    assert read_ending(tmp_path) is None
    assert announce_ending(first, directory=tmp_path) == first
    assert announce_ending(second, directory=tmp_path) == first
    assert read_ending(tmp_path) == first
    assert read_ending(tmp_path, since=100.0) is None
    assert [path.name for path in tmp_path.iterdir()] == ["ending.json"]


def test_the_end_is_announced_on_a_filesystem_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    first = Ending(rank=1, host="b", written=4.0, leave_at=5.0, reason="late")
    assert announce_ending(first, directory=tmp_path) == first
    assert announce_ending(replace(first, rank=0), directory=tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["ending.json"]


@pytest.mark.parametrize("links", [True, False])
def test_of_a_node_one_rank_asks_the_shared_filesystem_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    shared, made = tmp_path / "shared", []
    local = [tmp_path / "node-0", tmp_path / "node-1"]
    for path in (shared, *local):
        path.mkdir()
    link = os.link

    def count(source: Path, target: Path) -> None:
        made.append(target.parent)
        if not links:
            raise OSError(errno.EOPNOTSUPP, "no hard links")
        link(source, target)

    monkeypatch.setattr(os, "link", count)
    found: dict[int, Ending] = {}

    def announce(rank: int) -> None:
        asked = Ending(rank=rank, host="a", written=float(rank), leave_at=5.0, reason="late")
        found[rank] = announce_from_node(asked, shared=shared, local=local[rank % 2])

    threads = [threading.Thread(target=announce, args=(rank,)) for rank in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 32
    assert {ending.rank for ending in found.values()} == {found[0].rank}
    assert made.count(shared) <= 2


def test_a_rank_that_asks_and_does_not_come_back_holds_up_no_other(tmp_path: Path) -> None:
    for name in ("shared", "local"):
        (tmp_path / name).mkdir()
    (tmp_path / "local" / "announcing").touch()
    asked = Ending(rank=1, host="b", written=4.0, leave_at=5.0, reason="late")
    assert announce_from_node(asked, shared=tmp_path / "shared", local=tmp_path / "local") == asked
    assert read_ending(tmp_path / "shared") == asked


@pytest.mark.parametrize("comes", [True, False])
def test_the_ranks_of_later_nodes_give_the_first_ones_time_to_announce_the_end(
    tmp_path: Path, comes: bool
) -> None:
    """The leader brings the announcement while a rank waits for it; if it does not, the rank announces the end."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    shared.mkdir()
    local.mkdir()
    first = Ending(rank=0, host="a", written=4.0, leave_at=5.0, reason="late")
    asked = Ending(rank=40, host="b", written=4.0, leave_at=5.0, reason="late")
    leader = threading.Timer(0.2, lambda: announce_ending(first, directory=local))
    if comes:
        leader.start()
    found = announce_from_node(asked, shared=shared, local=local, after_s=60.0 if comes else 0.1)
    assert found == (first if comes else asked)
    assert read_ending(shared) == (None if comes else asked)
