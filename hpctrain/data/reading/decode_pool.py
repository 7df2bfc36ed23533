"""Runs decoding tasks in the calling thread and a few others."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], None]


def default_threads() -> int:
    """Returns the number of cores of this process, at most 4, since several ranks share a node."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class DecodeThreads:
    """At most `num_threads` threads, callers included, or one per caller if there are more callers.

    The threads end when this object is collected.
    """

    def __init__(self, *, num_threads: int) -> None:
        self.num_threads = num_threads
        self._num_callers = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks and waits for them. After an error no other task begins, and the error is raised."""
        queue = deque(tasks)
        errors: list[BaseException] = []

        def work() -> None:
            while queue and not errors:
                try:
                    task = queue.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    task()
                except BaseException as error:
                    errors.append(error)

        with self._lock:
            self._num_callers += 1
            num_others = min(self.num_threads - self._num_callers, len(tasks) - 1)
        others = []
        try:
            if num_others > 0:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(
                        self.num_threads - 1, thread_name_prefix="hpctrain-decode"
                    )
                others = [self._pool.submit(work) for _ in range(num_others)]
            work()
            for other in others:
                # No tasks remain, so one that has not begun is cancelled: the threads may be busy with another gather.
                if not other.cancel():
                    other.result()
        finally:
            with self._lock:
                self._num_callers -= 1
        if errors:
            raise errors[0]
