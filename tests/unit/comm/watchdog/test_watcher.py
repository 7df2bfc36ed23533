"""What watchers of several ranks tell each other through their directory, without any communication."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.watchdog import section_limits, watcher
from hpctrain.comm.watchdog.board.node_files import (
    Ending,
    NodeStatus,
    alarm_path,
    announce_ending,
    call,
    call_path,
    ending_path,
    forget_endings,
    node_path,
    position_path,
    read_ending,
    read_local,
    write_node,
)
from hpctrain.comm.watchdog.operation_state import ProgressMonitor
from tests.states import wait_for
from tests.unit.comm.watchdog.rank_alone import FOUR, SEVEN, Rank, folders, position

pytestmark = pytest.mark.timing


def test_different_buffers_end_all_ranks_long_before_the_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = [Rank(rank, timeout_s=600, directory=tmp_path) for rank in (0, 1)]
    start_s = time.monotonic()
    with (
        ranks[0].track.during("all_reduce", signature=FOUR),
        ranks[1].track.during("all_reduce", signature=SEVEN),
    ):
        for rank in ranks:
            assert rank.ended.wait(60 - (time.monotonic() - start_s))
    told = capfd.readouterr().err
    assert [rank.how[0] for rank in ranks] == [("leave", 6), ("leave", 6)]
    for rank in (0, 1):
        assert f"rank {rank} on {os.uname().nodename} ends" in told
    assert f"has {SEVEN}, where 1 of 2 have {FOUR}" in told
    for rank_ in ranks:
        rank_.watcher.end()


def test_many_ranks_end_when_one_has_reported_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 17 ranks 16 never come. Reports of them could take 0.6 x 36 s."""
    monkeypatch.setattr(section_limits, "_ENDING_SHARE", 0.9)
    monkeypatch.setattr(section_limits, "_ENDING_AT_MOST_S", 60.0)
    monkeypatch.setattr(watcher, "_TOGETHER_SHARE", 0.02)
    rank = Rank(0, timeout_s=40.0, directory=tmp_path, num_ranks=17)
    with rank.track.during("barrier"):
        assert rank.ended.wait(300)
    ended, ending = time.time(), read_ending(rank.folders.shared)
    assert rank.how[0] == ("abort", 6)
    assert "did not come: ranks 1-16\n" in capfd.readouterr().err
    assert ending is not None
    assert ended < ending.leave_at
    rank.watcher.end()


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)])
def test_a_rank_that_is_not_late_itself_ends_with_the_one_that_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], nodes: tuple[int, int]
) -> None:
    # A quarter of the limit is left to the other rank for its report: enough on a busy machine.
    ranks = [Rank(rank, timeout_s=8.0, directory=tmp_path, nodes=nodes) for rank in (0, 1)]
    with ranks[0].track.during("barrier"):
        for rank in ranks:
            assert rank.ended.wait(120)
    assert [rank.how[0] for rank in ranks] == [("leave", 6), ("leave", 6)]
    told = capfd.readouterr().err
    assert "did not come: rank 1" in told
    assert "rank 1 on" in told
    assert "is in no operation" in told
    assert "other ranks wait for rank 1 on" in told
    assert "wait for it" not in told  # only the reporting rank, which is in the first line
    for rank_ in ranks:
        rank_.watcher.end()


def test_of_many_ranks_one_reports_for_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = [Rank(rank, timeout_s=4.0, directory=tmp_path, num_ranks=17) for rank in (0, 1)]
    with ranks[0].track.during("barrier"), ranks[1].track.during("barrier"):
        for rank in ranks:
            assert rank.ended.wait(120)
    report = capfd.readouterr().err
    assert report.count("this rank's threads are at") == 1
    assert report.count("did not come: ranks 2-16\n") == 1
    for rank in ranks:
        rank.watcher.end()


def test_ranks_of_a_node_that_has_written_nothing_are_named_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(0, timeout_s=2.0, directory=tmp_path, nodes=(0, 0, 1, 1))
    for _ in range(3):
        with rank.track.during("barrier"):
            pass
    with rank.track.during("barrier"):
        assert rank.ended.wait(120)
    told = capfd.readouterr().err
    before = "finished number 3 of this group but did not begin this one"
    assert f"  rank 1 on h0 {before}, and has written nothing since" in told
    assert f"  ranks 2-3 on h1 {before}, and no rank of this node has written anything since" in told
    rank.watcher.end()


def test_what_an_earlier_attempt_requested_is_not_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared = folders(tmp_path, rank=0, nodes=(0,)).shared
    call(shared, rank=0)
    alarm_path(shared).touch()
    for path in (call_path(shared, rank=0), alarm_path(shared)):
        os.utime(path, (0, 0))
    rank = Rank(0, timeout_s=4.0, directory=tmp_path)
    time.sleep(1.5)
    assert "other ranks wait" not in capfd.readouterr().err
    call(shared, rank=0)
    alarm_path(shared).touch()
    wait_for(lambda: not any(call_path(folder, rank=0).exists() for folder in (shared, rank.folders.local)))
    time.sleep(0.5)
    assert capfd.readouterr().err.count("other ranks wait for rank 0") == 1
    rank.watcher.end()


def test_progress_is_usual_for_some_times_the_usual_gap() -> None:
    monitor = ProgressMonitor(at_most_s=75.0, _seen_at_s=0.0)
    assert monitor.is_usual([(1, None)], now_s=0.5)
    assert monitor.is_usual([(1, None)], now_s=2.4)
    assert not monitor.is_usual([(1, None)], now_s=2.6)
    assert monitor.is_usual([(1, 3.0)], now_s=10.5)  # 10 s later: then it may be 30 s
    assert monitor.is_usual([(1, 3.0)], now_s=40.4)
    assert not monitor.is_usual([(1, 3.0)], now_s=40.6)
    for step in range(1000):  # short steps: the long one is forgotten
        assert monitor.is_usual([(step + 2, None)], now_s=41.0 + step)
    assert not monitor.is_usual([(1001, None)], now_s=1044.1)
    assert monitor.is_usual([(2000, None)], now_s=2000.0)  # after a pause of 960 s
    assert not monitor.is_usual([(2000, None)], now_s=2075.1)


def test_a_rank_that_makes_progress_does_not_renew_its_file(tmp_path: Path) -> None:
    rank = Rank(0, timeout_s=16.0, directory=tmp_path)  # would renew it every second
    own = position_path(rank.folders.local, rank=0)

    def renews() -> bool:
        before_ns = own.stat().st_mtime_ns
        for _ in range(15):
            with rank.track.during("all_reduce"):
                time.sleep(0.15)
            time.sleep(0.15)
        return own.stat().st_mtime_ns != before_ns

    # A thread that a busy machine has kept from running for a second takes its rank for suspended, and renews the file.
    assert not all(renews() for _ in range(3))
    began_ns = own.stat().st_mtime_ns
    wait_for(lambda: own.stat().st_mtime_ns != began_ns, timeout_s=20)  # nothing begins or ends any more
    assert read_local(rank.folders.local)[0].groups["world"].sequence >= 15
    rank.watcher.end()


def test_files_that_hang_do_not_hold_up_the_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe stands for a file on a server that is gone: to open it waits for ever."""
    path = node_path(folders(tmp_path, rank=0, nodes=(0, 1, 2)).shared, node=1)
    os.mkfifo(path)
    rank = Rank(0, timeout_s=0.5, directory=tmp_path, nodes=(0, 1, 2))
    with rank.track.during("barrier"):
        assert rank.ended.wait(120)
    assert [code for _, code in rank.how] == [6]
    told = capfd.readouterr().err
    assert "did not come: rank 2\n" in told
    assert "the files of h1 cannot be read" in told
    rank.watcher.end()


def test_what_an_earlier_attempt_left_counts_for_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 of that attempt waited in the same operation with another buffer, and had told that it leaves."""
    ago, shared = time.time() - 60, folders(tmp_path, rank=0, nodes=(0, 1)).shared
    left = replace(position(1, signature=SEVEN, sequence=1, written=ago), leaving=True)
    write_node(NodeStatus(node=1, host="h1", written=ago, positions={1: left}), shared=shared, rank=1)
    announce_ending(
        Ending(rank=1, host="b", written=ago, leave_at=ago + 5, reason="an old reason"), directory=shared
    )
    forget_endings(shared, since=ago + 30)
    assert not ending_path(shared).exists()
    rank = Rank(0, timeout_s=3.0, directory=tmp_path, nodes=(0, 1))
    with rank.track.during("all_reduce", signature=FOUR):
        assert rank.ended.wait(120)
    told = capfd.readouterr().err
    assert rank.how[0] == ("abort", 6)  # rank 1 has not said that it leaves
    assert "rank 1 on h1 did not begin it, and no rank of this node has written anything" in told
    assert "different arguments" not in told
    assert "old reason" not in told
    rank.watcher.end()


def test_an_ending_announced_while_this_rank_starts_is_kept(tmp_path: Path) -> None:
    now, shared = time.time(), folders(tmp_path, rank=0, nodes=(0, 1)).shared
    announce_ending(Ending(rank=1, host="b", written=now, leave_at=now, reason="late"), directory=shared)
    forget_endings(shared, since=now - 2)
    rank = Rank(0, timeout_s=2.0, directory=tmp_path, nodes=(0, 1))
    assert rank.ended.wait(120)
    assert rank.how == [("leave", 6)]
    rank.watcher.end()
