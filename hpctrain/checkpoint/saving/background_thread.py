"""The thread that writes a checkpoint while training continues."""

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

from hpctrain.errors import HpctrainError

P = ParamSpec("P")
T = TypeVar("T")

# Lower CPU priority than training, but high enough to progress when all cores are always busy.
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}  # number of the system call ioprio_set(2)
_WHO_THREAD = 1
_BEST_EFFORT_LOWEST = (2 << 13) | 7  # not the idle class, which can starve


@final
class BackgroundThread(Executor):
    """Executor that runs the submitted calls one after another, in one thread of low CPU and I/O priority.

    Not a ThreadPoolExecutor: that accepts no work once the interpreter is shutting down, when a checkpoint in flight
    still has to run its last phase. The thread is a daemon.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `fn(*args, **kwargs)` in the thread after what was submitted before. Raises RuntimeError once closed."""
        if self._closed:
            raise RuntimeError(f"the thread {self._name} is closed: nothing more can be submitted")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # raised by Future.result
                future.set_exception(error)
            else:
                future.set_result(value)

        self._tasks.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more calls; the thread ends after those submitted. `cancel_futures` has no effect."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        _lower_priority()
        while (task := self._tasks.get()) is not None:
            task()
            # The task refers to the copies of the state: release them now, not when the next task arrives.
            del task


def _lower_priority() -> None:
    """Lowers the CPU and I/O priority of the calling thread, which Linux sets per thread. Ignores failures."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        lower = min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
        os.setpriority(os.PRIO_PROCESS, thread, lower)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with suppress(OSError, AttributeError):
            syscall: Any = ctypes.CDLL(None).syscall
            syscall(number, _WHO_THREAD, 0, _BEST_EFFORT_LOWEST)


def submit(executor: Executor | None, work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` in the executor, or immediately if that is None. Returns its future.

    `Future.result` raises an OSError or HpctrainError of `work`. Without an executor any other error, a bug, is raised
    immediately.
    """
    if executor is not None:
        return executor.submit(work)
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except (OSError, HpctrainError) as error:
        done.set_exception(error)
    return done
