"""What watchers of several ranks tell each other through their directory, without any communication."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.operation_state import ProgressMonitor, Track
from hpctrain.comm.watchdog.rank_status import (
    Ending,
    GroupPosition,
    RankPosition,
    announce_ending,
    ending_path,
    find_different,
    position_path,
    read_ending,
    read_positions,
    write_position,
)
from hpctrain.comm.watchdog.watcher import Watcher

FOUR, SEVEN = "all_reduce (4 x float32) sum", "all_reduce (7 x float32) sum"


def position(
    rank: int, signature: str | None, *, sequence: int = 3, waits: bool = True, written: float = 0.0
) -> RankPosition:
    place = GroupPosition(
        sequence=sequence, operation="all_reduce", waiting_s=2.5 if waits else None, signature=signature
    )
    return RankPosition(rank=rank, host=f"h{rank}", pid=1, written=written, groups={"world": place})


def different(*positions: RankPosition, signature: str = FOUR, num_expected: int = 0) -> str | None:
    return find_different(
        {p.rank: p for p in positions}, rank=0, group="world", sequence=3, signature=signature,
        num_expected=num_expected,
    )  # fmt: skip


def test_the_rank_with_another_buffer_is_the_one_that_differs_from_most() -> None:
    told = different(position(1, SEVEN), position(2, FOUR))
    assert told is not None
    assert f"rank 1 on h1 has {SEVEN}, where 2 of 3 have {FOUR}" in told
    told = different(position(1, FOUR), position(2, FOUR), signature=SEVEN)
    assert told is not None
    assert f"rank 0 has {SEVEN}, where 2 of 3 have {FOUR}" in told


def test_of_two_ranks_none_is_blamed_while_a_third_may_come() -> None:
    assert different(position(1, FOUR), signature=SEVEN, num_expected=3) is None
    told = different(position(1, FOUR), position(2, FOUR), signature=SEVEN, num_expected=3)
    assert told is not None
    assert f"rank 0 has {SEVEN}, where 2 of 3 have {FOUR}" in told
    assert different(position(1, FOUR), signature=SEVEN, num_expected=2) is not None


def test_ranks_elsewhere_are_not_compared() -> None:
    elsewhere = [position(1, SEVEN, sequence=2), position(2, SEVEN, waits=False), position(3, None)]
    assert different(*elsewhere) is None


def test_the_first_rank_to_end_the_run_is_the_one_that_counts(tmp_path: Path) -> None:
    first = Ending(rank=1, host="b", written=4.0, leave_at=5.0, reason="late")
    second = Ending(rank=0, host="a", written=5.0, leave_at=6.0, reason="late too")
    assert read_ending(tmp_path) is None
    assert announce_ending(first, directory=tmp_path) == first
    assert announce_ending(second, directory=tmp_path) == first
    assert read_ending(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["ending.json"]


def test_what_was_written_before_a_time_is_not_read(tmp_path: Path) -> None:
    for rank, written in enumerate((99.0, 101.0)):
        write_position(position(rank, FOUR, written=written), directory=tmp_path)
    announce_ending(Ending(rank=1, host="b", written=99.0, leave_at=104.0, reason="late"), directory=tmp_path)
    assert list(read_positions(tmp_path, ranks=(0, 1), since=100.0)) == [1]
    assert read_ending(tmp_path, since=100.0) is None
    assert read_ending(tmp_path, since=98.0) is not None


class Rank:
    """A rank that only has a watcher: it notes how the watcher ends it."""

    def __init__(self, rank: int, *, timeout_s: float, directory: Path) -> None:
        self.ended = threading.Event()
        self.how: list[tuple[str, int]] = []
        self.watcher = Watcher(
            rank=rank,
            timeout_s=timeout_s,
            abort=lambda code: self.end("abort", code),
            leave=lambda code: self.end("leave", code),
            directory=directory,
        )
        self.track: Track = self.watcher.track(group="world", members=(0, 1))

    def end(self, how: str, code: int) -> None:
        self.how.append((how, code))
        self.ended.set()


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
            assert rank.ended.wait(10 - (time.monotonic() - start_s))
    told = capfd.readouterr().err
    assert [rank.how[0] for rank in ranks] == [("leave", 6), ("leave", 6)]
    for rank in (0, 1):
        assert f"rank {rank} on {os.uname().nodename} ends" in told
    assert f"has {SEVEN}, where 1 of 2 have {FOUR}" in told
    for rank_ in ranks:
        rank_.watcher.end()


def test_a_rank_that_is_not_late_itself_ends_with_the_one_that_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = [Rank(rank, timeout_s=1.2, directory=tmp_path) for rank in (0, 1)]
    with ranks[0].track.during("barrier"):
        for rank in ranks:
            assert rank.ended.wait(10)
    assert [rank.how[0] for rank in ranks] == [("leave", 6), ("leave", 6)]
    told = capfd.readouterr().err
    assert "did not come: rank 1" in told
    assert "rank 1 on" in told
    assert "is in no operation" in told
    for rank_ in ranks:
        rank_.watcher.end()


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
    own = position_path(tmp_path, rank=0)

    def renews() -> bool:
        before_ns = own.stat().st_mtime_ns
        for _ in range(15):
            with rank.track.during("all_reduce"):
                time.sleep(0.15)
            time.sleep(0.15)
        return own.stat().st_mtime_ns != before_ns

    # A thread that a busy machine has kept from running for a second takes its rank for suspended, and renews the file.
    assert not all(renews() for _ in range(3))
    began_ns, deadline_s = own.stat().st_mtime_ns, time.monotonic() + 20
    while own.stat().st_mtime_ns == began_ns:  # nothing begins or ends any more
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert read_positions(tmp_path, ranks=[0])[0].groups["world"].sequence >= 15
    rank.watcher.end()


def test_files_that_hang_do_not_hold_up_the_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe stands for a file on a server that is gone: to open it waits for ever."""
    os.mkfifo(position_path(tmp_path, rank=1))
    rank = Rank(0, timeout_s=0.5, directory=tmp_path)
    with rank.track.during("barrier"):
        assert rank.ended.wait(8)
    assert [code for _, code in rank.how] == [6]
    assert "cannot be read" in capfd.readouterr().err
    rank.watcher.end()


def test_what_an_earlier_attempt_left_counts_for_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 of that attempt waited in the same operation with another buffer, and had told that it leaves."""
    ago = time.time() - 60
    write_position(replace(position(1, SEVEN, sequence=1, written=ago), leaving=True), directory=tmp_path)
    announce_ending(
        Ending(rank=1, host="b", written=ago, leave_at=ago + 5, reason="an old reason"), directory=tmp_path
    )
    rank = Rank(0, timeout_s=3.0, directory=tmp_path)
    assert not ending_path(tmp_path).exists()
    with rank.track.during("all_reduce", signature=FOUR):
        assert rank.ended.wait(15)
    told = capfd.readouterr().err
    assert rank.how[0] == ("abort", 6)  # rank 1 has not said that it leaves
    assert "rank 1 has written no position file" in told
    assert "different arguments" not in told
    assert "old reason" not in told
    rank.watcher.end()


def test_an_ending_announced_while_this_rank_starts_is_kept(tmp_path: Path) -> None:
    now = time.time()
    announce_ending(Ending(rank=1, host="b", written=now, leave_at=now, reason="late"), directory=tmp_path)
    rank = Rank(0, timeout_s=2.0, directory=tmp_path)
    assert rank.ended.wait(10)
    assert rank.how == [("leave", 6)]
    rank.watcher.end()
