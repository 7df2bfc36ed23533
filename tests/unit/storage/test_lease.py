"""One process at a time writes to a directory. The other processes are real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.storage import InUseError, Lease, LeaseLocation, check_lease, release_lease, take_lease
from hpctrain.storage.lease import Holder

HOLDING = """
import sys
from hpctrain.storage import take_lease

take_lease(sys.argv[1])
print("has it", flush=True)
input()
"""
Other = subprocess.Popen[str]


@pytest.fixture(autouse=True)
def _nobody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.storage.lease._lost", set())


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    """A process that has the lease until it reads a line."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def pretend(directory: Path, holder: Holder, *, number: int = 1, renewals: int = 0) -> None:
    """Writes the lease that another machine's process would have written."""
    text = json.dumps({"holder": holder.to_json(), "renewals": renewals})
    (directory / f".lease-{number:08d}").write_text(text)


def test_a_process_that_runs_is_named_and_one_that_ended_is_not_waited_for(
    tmp_path: Path, other: Other
) -> None:
    with pytest.raises(InUseError, match=f"in use by another run: process {other.pid} on .*, since 20"):
        Lease.take(LeaseLocation.within(tmp_path))
    other.send_signal(signal.SIGSTOP)  # suspended is not ended
    with pytest.raises(InUseError, match="in use by another run"):
        Lease.take(LeaseLocation.within(tmp_path))
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    Lease.take(LeaseLocation.within(tmp_path)).release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_gives_it_back(tmp_path: Path, other: Other) -> None:
    other.communicate("\n")
    assert other.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path) -> None:
    pretend(tmp_path, replace(Holder.of_this_process("0" * 16), pid=2**22 - 1, ticks=1))  # has ended
    found: list[Lease] = []
    refused: list[InUseError] = []

    def take() -> None:
        try:
            found.append(Lease.take(LeaseLocation.within(tmp_path)))
        except InUseError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(refused)) == (1, 7)
    assert LeaseLocation.within(tmp_path).newest() == 2
    found[0].release()


def test_one_of_another_machine_that_is_not_renewed_is_taken_over_after_a_while(tmp_path: Path) -> None:
    elsewhere = replace(Holder.of_this_process("0" * 16), host="elsewhere", boot="b", job="12")
    pretend(tmp_path, elsewhere)
    lines: list[str] = []
    Lease.take(LeaseLocation.within(tmp_path), say=lines.append, lost_after_s=0.2, poll_s=0.05).release()
    (line,) = lines
    assert f"in use by process {os.getpid()} on elsewhere (Slurm job 12), since" in line
    assert "waiting for up to 0 s to see whether it still runs" in line


def test_the_second_lease_of_a_process_that_is_lost_is_taken_over_at_once(tmp_path: Path) -> None:
    elsewhere = replace(Holder.of_this_process("0" * 16), host="elsewhere", boot="b")
    lines: list[str] = []
    for place, lost_after_s in ((tmp_path / "run", 0.1), (tmp_path / "checkpoints", 3000.0)):
        place.mkdir()
        pretend(place, elsewhere)
        Lease.take(
            LeaseLocation.within(place), say=lines.append, lost_after_s=lost_after_s, poll_s=0.05
        ).release()
    assert len(lines) == 1


def test_one_of_another_machine_that_is_renewed_is_respected(tmp_path: Path) -> None:
    elsewhere = replace(Holder.of_this_process("0" * 16), host="elsewhere", boot="b")
    pretend(tmp_path, elsewhere)
    with pytest.raises(InUseError, match=r"in use by another run: process .* on elsewhere"):
        Lease.take(
            LeaseLocation.within(tmp_path),
            say=lambda _: pretend(tmp_path, elsewhere, renewals=1),
            lost_after_s=60.0,
            poll_s=0.05,
        )


@pytest.mark.parametrize(
    ("before", "now", "ended"),
    [
        ({"job": "7", "restart": 0}, {"job": "7", "restart": 1}, True),  # queued again
        ({"job": "7", "attempt": 1}, {"job": "7", "attempt": 2}, True),  # of `hpctrain supervise`
        ({"job": "7", "restart": 1}, {"job": "7", "restart": 0}, False),  # what asks is the earlier life
        ({"job": "7", "attempt": 2}, {"job": "7", "attempt": 1}, False),
        ({"job": "7", "attempt": 2}, {"job": "7", "attempt": 2}, None),
        ({"job": "7", "restart": 1}, {"job": "7", "restart": 1}, None),  # two steps of one job
        ({"job": "7"}, {"job": "8"}, None),
        ({"job": ""}, {"job": ""}, None),
    ],
)
def test_earlier_lives_of_a_job_have_ended(
    before: dict[str, object], now: dict[str, object], ended: bool | None
) -> None:
    here = Holder.of_this_process("0" * 16)
    there = replace(here, host="elsewhere", boot="b", **before)  # type: ignore[arg-type]
    assert there.has_ended(seen_by=replace(here, **now)) is ended  # type: ignore[arg-type]


def test_a_process_number_that_is_used_again_is_not_the_same_process() -> None:
    here = Holder.of_this_process("0" * 16)
    assert here.has_ended(seen_by=here) is False
    assert replace(here, ticks=here.ticks + 1).has_ended(seen_by=here) is True
    # The same machine after it was started again, or another one of that name.
    assert replace(here, boot="before").has_ended(seen_by=here) is None
    assert replace(here, namespace="pid:[1]").has_ended(seen_by=here) is None  # another container


def test_a_process_that_proc_hides_is_not_taken_for_ended(
    other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's is where /proc is mounted with `hidepid`."""
    here = Holder.of_this_process("0" * 16)
    hidden = replace(here, pid=other.pid)
    monkeypatch.setattr("hpctrain.storage.lease._text", lambda path: "")
    assert hidden.has_ended(seen_by=here) is None
    other.kill()
    other.wait()
    assert hidden.has_ended(seen_by=here) is True


@pytest.mark.parametrize(
    "job", ["", "7"]
)  # suspended for long; given up by Slurm, which has queued its job again
def test_a_process_that_comes_back_after_its_successor_has_ended_sees_that_it_has_lost_the_lease(
    tmp_path: Path, job: str
) -> None:
    take_lease(tmp_path)
    first = json.loads((tmp_path / ".lease-00000001").read_text())["holder"]
    pretend(tmp_path, replace(Holder.from_json(first), host="elsewhere", job=job))
    successor = Lease.take(
        LeaseLocation.within(tmp_path), lost_after_s=0.1, poll_s=0.05,
        environ={"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "1"},
    )  # fmt: skip
    successor.release()
    with pytest.raises(InUseError, match="was taken over by process"):
        check_lease(tmp_path)
    release_lease(tmp_path)
    lines: list[str] = []
    Lease.take(LeaseLocation.within(tmp_path), say=lines.append).release()  # at once
    assert (lines, LeaseLocation.within(tmp_path).newest()) == ([], 3)


def test_a_listing_that_misses_the_newest_lease_gives_nobody_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that changes while it is listed may be listed without its newest file."""
    holder = Lease.take(LeaseLocation.within(tmp_path))
    os.rename(tmp_path / ".lease-00000001", tmp_path / ".lease-00000004")
    real, missed = LeaseLocation.newest, [0]
    monkeypatch.setattr(LeaseLocation, "newest", lambda place: missed.pop() if missed else real(place))
    with pytest.raises(InUseError, match="in use by another run"):
        Lease.take(LeaseLocation.within(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".lease-00000004"]
    holder.release()


def test_one_that_was_taken_over_is_noticed_and_left_alone(tmp_path: Path) -> None:
    take_lease(tmp_path)
    take_lease(tmp_path)
    pretend(tmp_path, replace(Holder.of_this_process("1" * 16), host="elsewhere"), number=2)
    with pytest.raises(InUseError, match=r"was taken over by process .* on elsewhere"):
        check_lease(tmp_path)
    release_lease(tmp_path)
    assert LeaseLocation.within(tmp_path).newest() == 2


def test_a_directory_made_again_is_claimed_again(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    take_lease(place)
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    place.mkdir()
    take_lease(place)
    assert LeaseLocation.within(place).newest() == 1
    release_lease(place)


def test_a_lease_that_cannot_be_read_is_watched_too(tmp_path: Path) -> None:
    (tmp_path / ".lease-00000005").write_text("")
    lines: list[str] = []
    Lease.take(LeaseLocation.within(tmp_path), say=lines.append, lost_after_s=0.1, poll_s=0.05).release()
    assert "a process that cannot be read" in lines[0]


def test_what_killed_processes_were_writing_is_removed_by_the_next_one(tmp_path: Path) -> None:
    ended = replace(Holder.of_this_process("0" * 16), pid=2**22 - 1, ticks=1)
    pretend(tmp_path, ended, number=20)
    for number in (1, 20, 21, 22):  # 22: of one that is just beginning
        (tmp_path / f".lease-{number:08d}.{number:016x}").touch()
    (tmp_path / ".lease-of-a-house").touch()
    lease = Lease.take(LeaseLocation.within(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lease-00000021", f".lease-00000021.{21:016x}", f".lease-00000022.{22:016x}", ".lease-of-a-house",
    ]  # fmt: skip
    lease.release()


def test_an_empty_lease_is_watched_for_a_shorter_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.storage.lease.EMPTY_AFTER_S", 0.1)
    (tmp_path / ".lease-00000005").write_text("")
    Lease.take(LeaseLocation.within(tmp_path), lost_after_s=3000.0, poll_s=0.05).release()
    assert [path.name for path in tmp_path.iterdir()] == [".lease-00000006"]  # its process may still run


def test_beside_a_directory_whose_content_is_listed(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    take_lease(place, in_parent=True)
    take_lease(tmp_path)  # another one
    assert list(place.iterdir()) == []
    assert {path.name for path in tmp_path.glob(".*")} == {".checkpoints.lease-00000001", ".lease-00000001"}
    release_lease(place, in_parent=True)
    release_lease(tmp_path)
    assert not list(tmp_path.glob(".*"))
