"""Operations behind the caller, and what follows them, run one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hpctrain.distributed.work import MessageWork, OperationThread
from hpctrain.errors import CommunicationError, UsageError


def test_callbacks_and_their_operations_run_before_the_next_operation() -> None:
    thread, may_go_on = OperationThread("of-this-test"), threading.Event()
    events: list[str] = []

    def first_operation() -> None:
        may_go_on.wait()
        events.append("first")

    def note(event: str) -> Callable[[], None]:
        return lambda: events.append(event)

    def follow(_: object) -> None:
        thread.run(note("asked by a callback"), [], behind=True).wait()
        thread.run(note("asked by it at once"), [], behind=False)
        events.append("callback")

    first = thread.run(first_operation, [], behind=True)
    following = first.get_future().then(follow)
    thread.run(note("second"), [], behind=True)
    may_go_on.set()
    thread.run(note("third"), [], behind=False)
    assert events == ["first", "asked by a callback", "asked by it at once", "callback", "second", "third"]
    following.wait()
    thread.close()


@pytest.mark.parametrize("by_future", [False, True])
def test_a_callback_may_wait_for_what_was_asked_for_before(by_future: bool) -> None:
    thread, may_go_on = OperationThread("of-this-test"), threading.Event()

    def first_operation() -> None:
        may_go_on.wait()

    def follow(_: object) -> list[torch.Tensor]:
        if by_future:
            return second.get_future().wait()
        second.wait()
        return second.result()

    first = thread.run(first_operation, [], behind=True)
    second = thread.run(lambda: None, [torch.ones(1)], behind=True)
    following = first.get_future().then(follow)
    may_go_on.set()
    assert following.wait()[0].item() == 1
    thread.close()


def test_an_error_is_raised_where_the_work_is_waited_for_and_by_later_operations() -> None:
    thread = OperationThread("of-this-test")

    def fail() -> None:
        raise CommunicationError("of this test")

    work = thread.run(fail, [], behind=True)
    for _ in range(2):
        with pytest.raises(CommunicationError, match="of this test"):
            work.wait()
    with pytest.raises(CommunicationError, match="of this test"):
        thread.run(lambda: None, [], behind=False)
    thread.close()


@pytest.mark.parametrize("behind", [False, True])
def test_no_operation_starts_after_the_end(behind: bool) -> None:
    thread = OperationThread("of-this-test")
    thread.close()
    with pytest.raises(UsageError, match="of-this-test is closed"):
        thread.run(lambda: None, [], behind=behind)


class Failing:
    """Messages that fail."""

    def finished(self, pending: object) -> bool:
        raise CommunicationError("of this test")

    def wait(self, pending: object, *, what: str) -> None:
        self.finished(pending)


def test_a_message_that_has_failed_behind_the_caller_raises_in_wait() -> None:
    work = MessageWork(Failing(), None, what="a message")  # type: ignore[arg-type]
    assert work.advance()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(CommunicationError, match="of this test"):
        work.wait()
