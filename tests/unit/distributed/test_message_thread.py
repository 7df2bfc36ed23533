"""The thread that lets messages make progress ends with its group."""

from __future__ import annotations

import threading

from hpctrain.distributed.work import MessageThread, MessageWork


class Slow:
    """Messages that have arrived when one has asked `asked` times."""

    def __init__(self, asked: int) -> None:
        self._left = asked

    def finished(self, pending: object) -> bool:
        self._left -= 1
        return self._left <= 0

    def wait(self, pending: object, *, what: str) -> None:
        while not self.finished(pending):
            pass


def test_no_thread_is_left_when_the_group_is_closed() -> None:
    received: list[int] = []
    thread = MessageThread("of-this-test")
    for number in range(3):
        work = MessageWork(
            Slow(40), None, what="a message", received=lambda number=number: received.append(number)
        )  # type: ignore[arg-type, misc]
        thread.watch(work)
    assert any(one.name == "of-this-test" for one in threading.enumerate())
    thread.close()
    assert sorted(received) == [0, 1, 2]
    assert not any(one.name == "of-this-test" for one in threading.enumerate())
