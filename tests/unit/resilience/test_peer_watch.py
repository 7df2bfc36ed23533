"""The end of another rank's process is noticed, and only that of the process that is meant."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace

from hpctrain.resilience import PeerWatch, RankProcess
from hpctrain.resilience.peer_watch import _ticks


def sleeping() -> tuple[subprocess.Popen[bytes], RankProcess]:
    child = subprocess.Popen(["sleep", "600"])
    return child, replace(RankProcess.of_this_process(), pid=child.pid, ticks=_ticks(child.pid))


def test_a_process_that_is_killed_is_reported_at_once_and_no_other() -> None:
    first, process = sleeping()
    second, other = sleeping()
    ended: list[int] = []
    seen = threading.Event()

    def note(rank: int) -> None:
        ended.append(rank)
        seen.set()

    watch = PeerWatch({3: process, 4: other}, ended=note)
    try:
        assert watch.watched == (3, 4)
        first.kill()
        assert seen.wait(100)
        assert ended == [3]  # although nobody has waited for the process yet
    finally:
        watch.close()
        second.kill()
        for child in (first, second):
            child.wait()
    assert ended == [3]


def test_a_process_of_another_machine_or_another_that_has_its_number_is_not_watched() -> None:
    child, process = sleeping()
    try:
        peers = {
            0: replace(process, machine="another boot"),
            1: replace(process, namespace="pid:[1]"),
            2: replace(process, ticks=process.ticks + 1),
            3: RankProcess(**process.to_json()),
        }
        watch = PeerWatch(peers, ended=lambda rank: None)
        assert watch.watched == (3,)
        watch.close()
        watch.close()
    finally:
        child.kill()
        child.wait()
