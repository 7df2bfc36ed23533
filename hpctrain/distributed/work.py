"""The works (handles) that process group operations return, and the threads that run operations in the background."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from hpctrain.comm import PeerMessages
from hpctrain.errors import CommunicationError, UsageError

# The interval in which unfinished messages are polled: they are delayed by it at most, and polling takes some 20 us.
_BETWEEN_S = 5e-4


def finished_work(outputs: Sequence[torch.Tensor]) -> CollectiveWork:
    """Returns the work of an operation that has already ended."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_result(None)
    return CollectiveWork(done, outputs)


class CollectiveWork(dist._Work):  # type: ignore[misc,name-defined]
    """A collective operation, running or ended. `wait` raises the error of the operation.

    thread: the thread that runs the operation; None if it has ended. awaited: whether the caller has seen that the
    operation has ended, by `wait` or `is_completed`.
    """

    def __init__(
        self,
        task: concurrent.futures.Future[None],
        outputs: Sequence[torch.Tensor],
        *,
        thread: OperationThread | None = None,
    ) -> None:
        super().__init__()
        self._task = task
        self._outputs = list(outputs)
        self._thread = thread
        self.awaited = False

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the operation has ended, and returns True.

        `timeout` is ignored. If the operation takes too long, the time limit of the run ends all ranks.
        """
        self.awaited = True
        if self._thread is not None:
            self._thread.advance_to(self._task)
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

    @property
    def error(self) -> BaseException | None:
        """The error with which the operation ended; None if the operation succeeded or still runs."""
        return self._task.exception() if self._task.done() else None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the result. Callbacks of `then` run on the group's thread; see `OperationThread`."""
        future = _OperationFuture()
        future.work = self

        def ended(task: concurrent.futures.Future[None]) -> None:
            error = task.exception()
            if error is None:
                future.set_result(self._outputs)
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        self._task.add_done_callback(ended)
        return future


class _OperationFuture(torch.futures.Future[list[torch.Tensor]]):
    """The future of an operation. Its `wait` runs the operation if a callback on the group's thread calls it."""

    work: CollectiveWork

    def wait(self) -> list[torch.Tensor]:
        self.work.wait()
        return super().wait()


class MessageWork(dist._Work):  # type: ignore[misc,name-defined]
    """A message that is being sent or received. `received` is called once the message has arrived."""

    def __init__(
        self, messages: PeerMessages, pending: Any, *, what: str, received: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._messages = messages
        self._pending = pending
        self._what = what
        self._received = received
        self._failed = False
        self._finishing = threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        """Waits until a received message has arrived, or the buffer of a sent message may be reused. Returns True.

        `timeout` is ignored.
        """
        with self._finishing:
            self._messages.wait(self._pending, what=self._what)
            self._deliver()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        with self._finishing:
            return self._look()

    def advance(self) -> bool:
        """Lets the message make progress, unless another thread is doing so.

        Returns True if the message has arrived or failed.
        """
        if not self._finishing.acquire(blocking=False):
            return False
        try:
            return self._look()
        finally:
            self._finishing.release()

    def is_success(self) -> bool:
        return self.is_completed() and not self._failed

    def source_rank(self) -> int:
        """Returns the rank of the group that sent the message, once it has arrived."""
        return self._messages.source_of(self._pending)

    def _source_rank(self) -> int:
        return self.source_rank()

    def _look(self) -> bool:
        """Returns True if the message has arrived or failed. `wait` raises the error."""
        try:
            if not self._messages.finished(self._pending):
                return False
            self._deliver()
        except CommunicationError:
            self._failed = True
        return True

    def _deliver(self) -> None:
        if self._received is not None:
            self._received()
            self._received = None


@final
class MessageThread:
    """A thread that lets the messages of a group make progress while the program computes.

    MPI moves messages only while MPI functions run. Without the thread, a large message would wait until both ranks
    call MPI, and the sender of a small message might wait for the receiver's next call of MPI. The thread keeps the
    memory of each message until the message has arrived.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._closed = False
        self._moving: list[MessageWork] = []
        self._changed = threading.Condition()

    def watch(self, work: MessageWork) -> None:
        """Lets `work` make progress until it has arrived."""
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

        A thread that frees a tensor while the interpreter shuts down would abort the process.
        """
        with self._changed:
            self._closed, left = True, list(self._moving)
            self._changed.notify()
        try:
            for work in left:
                work.wait()
        finally:
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
    """Runs the operations of one group in the order of the calls.

    If a caller waits for its operation, and no earlier operation is pending, the operation runs in the caller's thread.
    After an error that only some ranks raise, all later operations fail with the same error, since the ranks no longer
    agree on the next operation.

    Callbacks of an operation's future (`get_future().then`) also run on the thread, before the next operation, and
    operations that they start run at once. All ranks therefore run the same operations in the same order, whatever
    their speed: as if the caller had waited for each operation, and called its callbacks, before starting the next.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._asked: deque[tuple[concurrent.futures.Future[None], Callable[[], None]]] = deque()
        # The thread has nothing to do, no callback either, when both are equal.
        self._num_asked = self._num_ended = 0
        self._asking = threading.Lock()
        self._thread: int | None = None  # its identifier
        self._closed = False
        self._error: BaseException | None = None

    def run(
        self, operation: Callable[[], None], outputs: Sequence[torch.Tensor], *, behind: bool
    ) -> CollectiveWork:
        """Runs `operation` and returns its work (PyTorch's handle). Raises UsageError after `close`.

        behind: True: `run` returns at once. False: the operation has ended when `run` returns.
        """
        task: concurrent.futures.Future[None] = concurrent.futures.Future()
        if threading.get_ident() == self._thread:
            self._settle(task, operation)
        else:
            with self._asking:
                if self._closed:
                    raise UsageError(
                        f"{self._name} is closed (destroy_process_group has ended this group): start no operations "
                        "afterwards"
                    )
                if not behind and self._num_asked == self._num_ended:
                    self._settle(task, operation)
                else:
                    self._ask(task, operation)
                    if not behind:
                        concurrent.futures.wait([task])
        if not behind:
            task.result()
        return CollectiveWork(task, outputs, thread=self)

    def advance_to(self, task: concurrent.futures.Future[None]) -> None:
        """Runs the pending operations up to and including that of `task`. Does nothing on other threads than this one.

        A callback on this thread calls this method, because the operation would otherwise not start before the callback
        ends.
        """
        while threading.get_ident() == self._thread and not task.done():
            self._run_next()

    def close(self) -> None:
        """Waits for the operations that were started, then ends the thread."""
        with self._asking:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown()

    def _ask(self, task: concurrent.futures.Future[None], operation: Callable[[], None]) -> None:
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._num_asked += 1
        self._asked.append((task, operation))
        self._pool.submit(self._run_next)

    def _run_next(self) -> None:
        if not self._asked:
            return  # a callback was faster
        self._thread = threading.get_ident()
        self._settle(*self._asked.popleft())
        self._num_ended += 1

    def _settle(self, task: concurrent.futures.Future[None], operation: Callable[[], None]) -> None:
        """Runs the operation, then the callbacks of its future."""
        try:
            self._guarded(operation)
        except BaseException as error:
            task.set_exception(error)
        else:
            task.set_result(None)

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


# A barrier with a time limit, for groups and barriers to which a program has given a timeout.


_SLEEP_S = 1e-3


def barrier_with_timeout(
    messages: PeerMessages, *, rank: int, num_ranks: int, tag: int, timeout_s: float
) -> None:
    """Waits until all ranks of the group have called this function. Collective.

    tag: the tag of the barrier's messages, used for nothing else.

    Raises CommunicationError after `timeout_s` seconds. The ranks may then be at different operations, so that the
    group can no longer be used. MPI's own barrier cannot be interrupted; this is the dissemination barrier (Hensgen,
    Finkel and Manber 1988). It has log2(num_ranks) rounds, rounded up, of empty messages.
    """
    until = time.monotonic() + timeout_s
    distance = 1
    while distance < num_ranks:
        source = (rank - distance) % num_ranks
        pending = [
            messages.send(torch.empty(0, dtype=torch.uint8), to=(rank + distance) % num_ranks, tag=tag),
            messages.receive(torch.empty(0, dtype=torch.uint8), source=source, tag=tag),
        ]
        while not all(map(messages.finished, pending)):
            if time.monotonic() > until:
                raise CommunicationError(
                    f"barrier of {num_ranks} ranks: rank {rank} of the group has waited for rank {source} longer than "
                    f"its timeout of {timeout_s:g} s: find out where that rank is, or give new_group or barrier a "
                    "longer timeout"
                )
            time.sleep(_SLEEP_S)
        distance *= 2
