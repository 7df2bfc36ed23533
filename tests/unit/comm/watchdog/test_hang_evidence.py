"""Which late rank is hung and which is only slow, by what its process does; and what the system says of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from hpctrain.comm.watchdog.board.rank_status import (
    GONE,
    STOPPED,
    Absence,
    Activity,
    EarlyLimits,
    GroupPosition,
    IdleSince,
    Positions,
    RankNodes,
    RankPosition,
    activities,
    find_hung,
)
from tests.unit.comm.watchdog.rank_alone import position

PLACEMENT = RankNodes(node_of_rank=[0, 0, 1, 1], node_names=["h0", "h1"])
LIMITS = EarlyLimits(
    here_s=60.0, everywhere_s=300.0, of={"step": 60.0, "input": 300.0, "save": None, "": None}.get
)


def at(
    looked: float, *, cpu_s: float, state: str = "sleeps", section: str = "step", rank: int = 1
) -> RankPosition:
    """Of a late rank, past the operation before, when its node looked at its process."""
    activity = Activity(state=state, cpu_s=cpu_s, looked=looked)
    return replace(position(rank, sequence=4, waits=False), section=section, activity=activity)


def hung(
    before: RankPosition,
    now: RankPosition | None,
    *,
    waited_s: float = 61.0,
    silent_s: float | None = None,
    answers: dict[str, bool] | None = None,
) -> list[str]:
    idle = IdleSince()
    idle.update(Positions(by_rank={before.rank: before}))
    positions = Positions(by_rank={} if now is None else {now.rank: now})
    idle.update(positions)
    rank = before.rank if now is None else now.rank
    return find_hung(
        [Absence(ranks=(rank,), place="h1", state="", silent_s=silent_s)], now=positions, idle=idle,
        placement=PLACEMENT, answers=answers or {}, group="world", waited_s=waited_s, limits=LIMITS,
    )  # fmt: skip


def test_a_rank_that_does_nothing_for_long_in_a_step_is_hung() -> None:
    assert hung(at(100.0, cpu_s=5.0), at(108.0, cpu_s=5.1)) == [
        "rank 1 on h1 has used no CPU time for 8 s, and it waits in no operation (step)"
    ]


def test_a_rank_that_computes_or_has_been_watched_too_shortly_or_waits_for_a_file_is_not() -> None:
    before = at(100.0, cpu_s=5.0)
    for now in (
        at(108.0, cpu_s=5.5),
        at(108.0, cpu_s=4.0),  # a compiler that it had started has ended
        at(107.0, cpu_s=5.0),
        at(108.0, cpu_s=5.0, state="waits in the kernel, as for a file"),
        at(108.0, cpu_s=5.0, state="computes"),
        at(108.0, cpu_s=5.0, state=""),
        at(108.0, cpu_s=5.0, section="input"),
        at(108.0, cpu_s=5.0, section="save"),
        at(108.0, cpu_s=5.0, section=""),
        replace(at(108.0, cpu_s=5.0), activity=None),
    ):
        assert hung(before, now) == []
    assert hung(before, at(108.0, cpu_s=5.0), waited_s=60.0) == []
    assert len(hung(before, at(160.0, cpu_s=5.0, section="input"), waited_s=301.0)) == 1


def test_a_rank_that_waits_for_others_itself_is_not_the_one() -> None:
    now = at(108.0, cpu_s=5.0)
    elsewhere = GroupPosition(sequence=2, operation="broadcast", waiting_s=50.0)
    assert hung(at(100.0, cpu_s=5.0), replace(now, groups={**now.groups, "split 1": elsewhere})) == []


def test_a_stopped_or_ended_process_is_hung_at_once_after_the_limit() -> None:
    for state in (STOPPED, GONE):
        now = at(100.0, cpu_s=5.0, state=state, section="input")
        assert hung(now, now, silent_s=50.0) == [f"rank 1 on h1 {state}"]
        assert hung(now, now, waited_s=59.0) == []


def test_a_silent_rank_may_be_in_any_section() -> None:
    before, now = at(100.0, cpu_s=5.0), at(160.0, cpu_s=5.0)
    assert hung(before, now, silent_s=50.0) == []
    assert hung(before, now, silent_s=50.0, waited_s=301.0) == [
        "rank 1 on h1 has used no CPU time for 60 s, and its interpreter is blocked"
    ]


def test_a_silent_node_is_lost_only_if_it_does_not_answer() -> None:
    on_h1 = at(0.0, cpu_s=0.0, rank=2)
    assert hung(on_h1, None, answers={"h1": False}) == ["h1 does not answer"]
    assert hung(on_h1, None, answers={"h1": True}) == []
    assert hung(on_h1, None) == []
    assert hung(on_h1, None, answers={"h1": False}, waited_s=59.0) == []


# ---- real processes

_BUSY_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
_BUSY, _SLEEPS = "while True: pass", "import time; time.sleep(1000)"


def test_the_system_tells_stopped_ended_sleeping_and_computing_processes_apart() -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
        for script in (_SLEEPS, _BUSY, _BUSY_CHILD, _SLEEPS, _SLEEPS)
    ]
    asleep, busy, parent, stopped, ended = (process.pid for process in running)
    try:
        os.kill(stopped, signal.SIGSTOP)
        os.kill(ended, signal.SIGKILL)

        def found() -> dict[int, Activity]:
            return activities([asleep, busy, parent, stopped, ended])

        expected = {asleep: "sleeps", parent: "sleeps", stopped: STOPPED, ended: GONE}
        deadline_s, first = time.monotonic() + 300, found()
        while True:
            now = found()
            states = {pid: now[pid].state for pid in expected}
            used_s = {pid: now[pid].cpu_s - first[pid].cpu_s for pid in (busy, parent)}
            if states == expected and min(used_s.values()) > 0.5:
                break
            assert time.monotonic() < deadline_s, (states, used_s)
            time.sleep(0.2)
        later = found()
        time.sleep(1.0)
        assert found()[asleep].cpu_s - later[asleep].cpu_s < 0.05
        running[4].wait()
        assert found()[ended].state == GONE
    finally:
        for process in running:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
