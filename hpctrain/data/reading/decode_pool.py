"""Runs decoding tasks in a few threads beside the caller, which works too."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], None]


def default_threads() -> int:
    """Cores of this process, at most 4: ranks share a node's."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class DecodeThreads:
    """`num_threads` with the callers', however many callers there are. The threads end when this is collected."""

    def __init__(self, *, num_threads: int) -> None:
        self.num_threads = num_threads
        self._num_callers = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks and wait for them; after an error no further task begins, and it is raised."""
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
                # One that has not begun is not needed any more: another gather may have all threads.
                if not other.cancel():
                    other.result()
        finally:
            with self._lock:
                self._num_callers -= 1
        if errors:
            raise errors[0]
