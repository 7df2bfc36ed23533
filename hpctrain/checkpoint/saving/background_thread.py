"""The one thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import ctypes
import os
import platform
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, final

P = ParamSpec("P")
T = TypeVar("T")

# Below training, where both want the same core; it still moves when all cores are always busy.
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}  # the system call's number
_WHO_THREAD = 1
_BEST_EFFORT_LOWEST = (2 << 13) | 7  # not the idle class: that one may never come to write


@final
class BackgroundThread(Executor):
    """Runs what is submitted, one after the other, in one thread of low CPU and I/O priority.

    A daemon thread, and not one of ThreadPoolExecutor's: those take no more work once the interpreter begins
    to end, while a checkpoint that is in flight then still has its last phase to go.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._closed:
            raise RuntimeError(f"the thread {self._name} is closed: nothing more can be submitted")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(value)

        self._tasks.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; end after what was submitted. cancel_futures is not needed here: at most one runs."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        _lower_priority()
        while (task := self._tasks.get()) is not None:
            task()
            # Not until the next one comes: the task holds the state's copies.
            del task


def _lower_priority() -> None:
    """Of the calling thread; Linux has it for each thread. A system that refuses is left as it is."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        lower = min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
        os.setpriority(os.PRIO_PROCESS, thread, lower)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with suppress(OSError, AttributeError):
            syscall: Any = ctypes.CDLL(None).syscall
            syscall(number, _WHO_THREAD, 0, _BEST_EFFORT_LOWEST)
