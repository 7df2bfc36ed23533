"""Ranks on several nodes: who writes for a node, what lies in the run directory, who reports; and 10,000 of them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.board.node_files import (
    Ending,
    NodeStatus,
    WatchFolders,
    announce_ending,
    make_node_folders,
    node_path,
    read_ending,
    read_node,
    reported_path,
    write_node,
)
from hpctrain.comm.watchdog.board.rank_status import Activity, RankNodes
from hpctrain.comm.watchdog.board.status_board import PositionReader
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.comm.watchdog.timeout_report import describe_finding
from tests.states import wait_for
from tests.unit.comm.watchdog.rank_alone import Rank, position

pytestmark = pytest.mark.timing


def test_of_the_ranks_of_a_node_that_wait_one_writes_a_file_in_the_run_directory(tmp_path: Path) -> None:
    ranks = [Rank(rank, timeout_s=16.0, directory=tmp_path, nodes=(0, 0, 0, 1)) for rank in range(3)]
    shared = ranks[0].folders.shared

    def waiting() -> list[int]:
        status = read_node(shared, node=0)
        assert status is not None
        return [rank for rank, found in status.positions.items() if found.groups["world"].waiting_s]

    with (
        ranks[0].track.during("barrier"),
        ranks[1].track.during("barrier"),
        ranks[2].track.during("barrier"),
    ):
        wait_for(lambda: waiting() == [0, 1, 2])
        files = [path for path in shared.rglob("*") if path.is_file() and path.suffix != ".partial"]
        assert files == [node_path(shared, node=0)]
    for rank in ranks:
        rank.watcher.end()
    assert not ranks[0].folders.local.exists()


def test_the_next_rank_leads_a_node_whose_leader_is_silent_and_names_it(tmp_path: Path) -> None:
    """Rank 0 of node 0 and both of node 2 are stopped, so that they write nothing."""
    nodes = (0, 0, 1, 2, 2)
    ranks = [Rank(rank, timeout_s=24.0, directory=tmp_path, nodes=nodes) for rank in (1, 2)]
    for rank in ranks:
        with rank.track.during("barrier"):
            pass
    with ranks[0].track.during("barrier"), ranks[1].track.during("barrier"):
        wait_for(lambda: read_node(ranks[0].folders.shared, node=0) is not None)
        board = ranks[1].watcher._board
        assert board is not None
        found = board.find(ranks[1].track, within_s=5)
        before = "finished number 1 of this group but did not begin this one"
        told = [absence.text.partition(", last heard of")[0] for absence in found.absent]
        assert told == [
            f"rank 0 on h0 {before}, and has written nothing since",
            f"ranks 3-4 on h2 {before}, and no rank of this node has written anything since",
        ]
        assert found.waiting == [1, 2]
    for rank in ranks:
        rank.watcher.end()


@pytest.mark.parametrize("reports", [True, False])
def test_another_rank_reports_if_the_announcing_one_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], reports: bool
) -> None:
    """Rank 16, alone on its node, announces the end, and is gone at once or after its report."""
    nodes = (0,) * 8 + (1,) * 8 + (2,)
    ranks = [Rank(rank, timeout_s=20.0, directory=tmp_path, nodes=nodes) for rank in (0, 1, 8)]
    shared = ranks[0].folders.shared
    with (
        ranks[0].track.during("barrier"),
        ranks[1].track.during("barrier"),
        ranks[2].track.during("barrier"),
    ):
        time.sleep(3)
        now = time.time()
        announce_ending(
            Ending(rank=16, host="h2", written=now, leave_at=now + 3, reason="it has waited"),
            directory=shared,
        )
        if reports:
            reported_path(shared).touch()
        for rank in ranks:
            assert rank.ended.wait(120)
    told = capfd.readouterr().err
    assert told.count("ends with rank 16 on h2: it has waited") == (0 if reports else 1)
    assert told.count("did not come: ranks 2-7, 9-16\n") == (0 if reports else 1)
    assert sorted(rank.how[0] for rank in ranks) == [("leave", 6)] * 3 if reports else [
        ("abort", 6), ("leave", 6), ("leave", 6),
    ]  # fmt: skip
    for rank in ranks:
        rank.watcher.end()


def test_all_ranks_of_all_nodes_leave_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Four real ranks on two nodes: the leaders tell the announcing rank that all have reported."""
    ranks = [Rank(rank, timeout_s=8.0, directory=tmp_path, nodes=(0, 0, 1, 1)) for rank in range(4)]
    with ranks[3].track.during("barrier"):
        for rank in ranks:
            assert rank.ended.wait(120)
    assert [rank.how[0] for rank in ranks] == [("leave", 6)] * 4
    assert "did not come: ranks 0-2\n" in capfd.readouterr().err
    assert read_ending(ranks[0].folders.shared) is not None
    for rank in ranks:
        rank.watcher.end()


def test_statuses_of_ten_thousand_ranks_on_1250_nodes_are_read_and_folded_in_two_seconds(
    tmp_path: Path,
) -> None:
    """Rank 17 is behind, rank 40 silent; the ranks of nodes 3, which is silent, and 7, which never wrote, too.

    Each has its stack with it: those that wait one of 50."""
    num_ranks, now = 10_000, time.time()
    folders = WatchFolders(
        rank=0, shared=tmp_path, local=tmp_path / "local",
        placement=RankNodes(
            node_of_rank=[rank // 8 for rank in range(num_ranks)], node_names=[f"node{node}" for node in range(1250)]
        ),
    )  # fmt: skip

    def status(node: int) -> NodeStatus:
        positions = {
            rank: replace(
                position(rank, sequence=300, host=f"node{node}", written=now - 0.5),
                stack=f"hpctrain/mpi_world.py:{rank % 50} all_reduce < {'a_long_file_of_the_users.py:120 loss < ' * 5}",
                section="step",
            )
            for rank in range(8 * node, 8 * node + 8)
        }
        if node == 2:
            late = position(17, sequence=284, waits=False, host="node2", written=now - 0.5)
            positions[17] = replace(late, stack="mine.py:7 loss")
        if node == 5:
            stopped = Activity(state="is stopped", cpu_s=1.0, looked=now)
            positions[40] = replace(positions[40], groups={}, written=now - 60.0, activity=stopped)
        return NodeStatus(
            node=node, host=f"node{node}", written=now - (100.0 if node == 3 else 0.0), positions=positions
        )

    make_node_folders(tmp_path, num_nodes=1250)
    for node in range(1250):
        if node != 7:
            write_node(status(node), shared=tmp_path, rank=8 * node)
    assert max(len(list(path.iterdir())) for path in tmp_path.iterdir()) == 256
    reader = PositionReader(
        folders, own_status=lambda: status(0), since=now - 1000.0, timeout_s=600.0, rank_silent_s=3.0,
        node_silent_s=30.0,
    )  # fmt: skip
    track = Track("world", tuple(range(num_ranks)), sequence=300, since=time.monotonic() - 200.0)
    start_s = time.perf_counter()
    found = reader.find(track, world=track.members, here="node0", reached={}, within_s=10.0)
    report = describe_finding(found, waits=True, num_asked=0)
    assert time.perf_counter() - start_s < 2
    lines = report.splitlines()
    assert len(lines) < 40
    before = "finished number 299 of this group but did not begin this one"
    everyone = f"{before}, and no rank of this node has written anything since"
    assert max(map(len, lines)) < 500
    assert [line.partition(", last heard of")[0] for line in lines[:6]] == [
        "did not come: ranks 17, 24-31, 40, 56-63",
        "  rank 17 on node2 (process 1) has finished all_reduce number 284 of this group and waits in no operation "
        "in step 12",
        f"  ranks 24-31 on node3 {everyone}",
        f"  rank 40 on node5 (process 1) {before}, and has written nothing since",
        f"  ranks 56-63 on node7 {everyone}",
        "wait for it: ranks 0-16, 18-23, 32-39, 41-55, 64-9999",
    ]
    assert lines[6:11] == [
        "stacks, the innermost call first:",
        "  rank 17 is at mine.py:7 loss",
        "  rank 40: no stack: interpreter blocked (the process is stopped)",
        "  ranks 24-31: no stack: no rank of node3 writes",
        "  ranks 56-63: no stack: no rank of node7 writes",
    ]
    assert (
        len(lines[11:15]) == len([line for line in lines if " wait at hpctrain/mpi_world.py:" in line]) == 4
    )
    assert " more with 46 other stacks: ranks 4-16, 18-23, " in lines[15]
    assert len(lines) == 16
