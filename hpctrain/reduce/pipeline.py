"""A thread that reduces buckets, in the order they are given, while backward goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Item:
    buffer: torch.Tensor
    filled: torch.cuda.Event | None


def _mark(buffer: torch.Tensor) -> torch.cuda.Event | None:
    """The present end of the calling thread's stream; None for a buffer in host memory."""
    if not buffer.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(buffer.device))
    return event


class ReductionPipeline:
    """Runs `reduce` on one buffer after another, on its own thread.

    Every rank gives its buffers in the same order, so the collective operations match. An exception in
    `reduce` is raised by the next `wait`; buffers given after it are dropped. On CUDA the thread has a
    current stream of its own: events order it behind the stream that filled a buffer, and the stream that
    calls `wait` behind the reductions.
    """

    def __init__(self, reduce: Callable[[torch.Tensor], None]) -> None:
        self._reduce = reduce
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._pending = 0
        self._busy_s = 0.0
        self._error: BaseException | None = None
        self._reduced: torch.cuda.Event | None = None
        self._thread = threading.Thread(target=self._run, name="hpctrain-reduce", daemon=True)
        self._thread.start()

    def submit(self, buffer: torch.Tensor) -> None:
        """Reduce `buffer` in place, some time before `wait` returns."""
        with self._condition:
            self._pending += 1
        self._queue.put(_Item(buffer, filled=_mark(buffer)))

    def wait(self) -> float:
        """Wait until all submitted buffers are reduced; seconds the reductions took since the last wait."""
        with self._condition:
            self._condition.wait_for(lambda: self._pending == 0)
            busy_s, self._busy_s = self._busy_s, 0.0
            error = self._error
            reduced, self._reduced = self._reduced, None
        if error is not None:
            raise error
        if reduced is not None:
            torch.cuda.current_stream().wait_event(reduced)
        return busy_s

    def close(self) -> None:
        """End the thread. A reduction that hangs is not waited for."""
        self._queue.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            started = time.perf_counter()
            try:
                if self._error is None:
                    if item.filled is not None:
                        torch.cuda.set_device(item.buffer.device)
                        torch.cuda.current_stream().wait_event(item.filled)
                    self._reduce(item.buffer)
                    self._reduced = _mark(item.buffer)
            except BaseException as error:
                self._error = error
            finally:
                with self._condition:
                    self._busy_s += time.perf_counter() - started
                    self._pending -= 1
                    self._condition.notify_all()
