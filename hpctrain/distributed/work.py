"""What an operation of a process group returns, and the thread on which operations run behind the caller."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from hpctrain.comm import PeerMessages
from hpctrain.errors import CommunicationError, UsageError

# Between two looks at messages that are under way: they are that late at most, and looking costs some 20 us.
_BETWEEN_S = 5e-4


def finished_work(outputs: Sequence[torch.Tensor]) -> CollectiveWork:
    """Returns the work of an operation that has ended."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_result(None)
    return CollectiveWork(done, outputs)


class CollectiveWork(dist._Work):  # type: ignore[misc,name-defined]
    """A collective operation, finished or running. `wait` raises its error.

    awaited: attribute, whether the caller has seen that it has ended, by `wait` or `is_completed`.
    """

    def __init__(self, task: concurrent.futures.Future[None], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._task = task
        self._outputs = list(outputs)
        self.awaited = False

    def wait(self, timeout: Any = None) -> bool:
        """Returns True when the operation has ended. timeout: not used; the run's own limit ends all ranks."""
        self.awaited = True
        self._task.result()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        self.awaited = self.awaited or self._task.done()
        return self._task.done()

    def is_success(self) -> bool:
        return self._task.done() and self._task.exception() is None

    def exception(self) -> BaseException | None:
        return self._task.exception()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def ended(task: concurrent.futures.Future[None]) -> None:
            error = task.exception()
            if error is None:
                future.set_result(self._outputs)
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        self._task.add_done_callback(ended)
        return future


class MessageWork(dist._Work):  # type: ignore[misc,name-defined]
    """A message that is being sent or received. received: called once when it has arrived."""

    def __init__(
        self, messages: PeerMessages, pending: Any, *, what: str, received: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._messages = messages
        self._pending = pending
        self._what = what
        self._received = received
        self._finishing = threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        """Returns True when the message has arrived, or its buffer may be used again. timeout: not used."""
        with self._finishing:
            self._messages.wait(self._pending, what=self._what)
            self._deliver()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        with self._finishing:
            if not self._messages.finished(self._pending):
                return False
            self._deliver()
        return True

    def advance(self) -> bool:
        """Lets the message make progress, unless another thread does. Returns True if it has arrived or failed."""
        if not self._finishing.acquire(blocking=False):
            return False
        try:
            if not self._messages.finished(self._pending):
                return False
            self._deliver()
        except CommunicationError:
            pass  # `wait` raises it again
        finally:
            self._finishing.release()
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def source_rank(self) -> int:
        """The rank of the group that sent the message, once it has arrived."""
        return self._messages.source_of(self._pending)

    def _source_rank(self) -> int:
        return self.source_rank()

    def _deliver(self) -> None:
        if self._received is not None:
            self._received()
            self._received = None


@final
class MessageThread:
    """Lets the messages of one group make progress while the program computes.

    MPI moves messages within its own calls only: a large one would wait until both ranks call it, a small one may keep
    its sender waiting for the receiver's next call. Keeps each message's memory until it has arrived.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._closed = False
        self._moving: list[MessageWork] = []
        self._changed = threading.Condition()

    def watch(self, work: MessageWork) -> None:
        """Has `work` make progress until it has arrived."""
        if work.advance():
            return
        with self._changed:
            self._moving.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Waits until all messages have arrived, and for the end of the thread.

        If it freed a tensor while the interpreter ends, the process would be aborted.
        """
        with self._changed:
            self._closed, left = True, list(self._moving)
            self._changed.notify()
        for work in left:
            work.wait()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._moving) or self._closed)
                if self._closed:
                    return
                moving = list(self._moving)
            arrived = {id(work) for work in moving if work.advance()}
            with self._changed:
                self._moving = [work for work in self._moving if id(work) not in arrived]
            time.sleep(_BETWEEN_S)


@final
class OperationThread:
    """Runs the operations of one group in the order in which they were asked for.

    A caller that waits anyway runs its operation itself, once those before it have ended. After an error that not all
    ranks raise, all later operations fail with it: the ranks no longer agree on which is the next.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._last: concurrent.futures.Future[None] | None = None
        self._asking = threading.Lock()
        self._error: BaseException | None = None

    def run(
        self, operation: Callable[[], None], outputs: Sequence[torch.Tensor], *, behind: bool
    ) -> CollectiveWork:
        """Returns the work of `operation`. behind: the caller goes on; otherwise it has ended when this returns."""
        with self._asking:
            if behind:
                if self._pool is None:
                    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=self._name)
                self._last = self._pool.submit(self._guarded, operation)
                return CollectiveWork(self._last, outputs)
            if self._last is not None:
                concurrent.futures.wait([self._last])
                self._last = None
            self._guarded(operation)
        return finished_work(outputs)

    def close(self) -> None:
        """Waits for the operations that were asked for."""
        if self._pool is not None:
            self._pool.shutdown()

    def _guarded(self, operation: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            operation()
        except UsageError:
            raise  # found before anything was sent
        except BaseException as error:
            if not getattr(error, "agreed", False):
                self._error = error
            raise
