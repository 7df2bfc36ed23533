"""Saves in the background: the copy of a rank's state in host memory, and the thread that writes it to disk."""

from __future__ import annotations

import ctypes
import os
import platform
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, final

import torch

from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES, fresh_tensor
from hpctrain.checkpoint.format.state import Item
from hpctrain.checkpoint.planning.rank_extents import Content, OwnBytes, content_in, copy_bytes, copy_to
from hpctrain.errors import CheckpointError, HpctrainError

# The thread that writes a checkpoint while training continues.


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

    A ThreadPoolExecutor cannot be used, since it accepts no calls once the interpreter shuts down. The last part of a
    save in progress must still be submitted at that time. The thread is a daemon thread.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues `fn(*args, **kwargs)` for the thread, after the calls submitted before.

        Raises RuntimeError after `shutdown`.
        """
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
        """Ends the thread after the calls submitted so far, and accepts no new calls.

        `cancel_futures` has no effect.
        """
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
    """Runs `work` in the executor, or at once if `executor` is None, and returns a future of the result.

    An OSError or HpctrainError of `work` is raised by `Future.result`. Without an executor, any other exception is
    a bug and is raised by this function.
    """
    if executor is not None:
        return executor.submit(work)
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except (OSError, HpctrainError) as error:
        done.set_exception(error)
    return done


# Copy of a rank's state in host memory, from which a background save writes.


@final
class HostBuffers:
    """Host memory for a copy of a rank's state. Each save reuses the memory of the previous save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._unpin: weakref.finalize[..., torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Allocated host memory, in bytes."""
        return self._memory.numel()

    def take(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Returns uninitialized memory: the memory of the previous call if that is large enough, otherwise new memory.

        Args:
            num_bytes: Required length.
            pinned: Pin the memory, so that copies from a CUDA device are faster and asynchronous. If the system
                refuses, the memory stays unpinned.

        Returns:
            Tensor of dtype uint8 and shape (num_bytes,), aligned to BLOCK_BYTES.

        Raises:
            CheckpointError: If there is not enough memory.
        """
        if num_bytes + BLOCK_BYTES > self._memory.numel() or (pinned and not self._pinned):
            self.release()  # before allocating more
            self._memory = fresh_tensor((num_bytes + BLOCK_BYTES,), dtype="uint8")
            self._memory.zero_()  # takes the page faults now instead of during the first copy
            if pinned:
                self._pinned = True  # also if it fails, so that the next saves do not try again
                self._unpin = _pin(self._memory)
        begin = -self._memory.data_ptr() % BLOCK_BYTES
        return self._memory[begin : begin + num_bytes]

    def release(self) -> None:
        """Returns the memory to the system."""
        if self._unpin is not None:
            self._unpin()
        self._unpin, self._pinned = None, False
        self._memory = torch.empty(0, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> weakref.finalize[..., torch.Tensor] | None:
    """Pins `memory` with cudaHostRegister and returns the function that unpins it, or None if the system refuses.

    The memory is also unpinned when it is freed. Torch's own pinned memory is no alternative: its allocator rounds
    sizes up to a power of two (33 GiB take 64 GiB), and keeps freed memory for other pinned tensors instead of
    returning it to the system.
    """
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) != 0:
        with suppress(RuntimeError):
            # Clears CUDA's pending error, which the next kernel would otherwise raise.
            torch.zeros(1, device="cuda")
        return None
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    unpin.atexit = False  # type: ignore[misc]  # CUDA may be shut down by then; typeshed declares it as a slot
    return unpin


def content_copied(sources: Sequence[Item], own: OwnBytes, *, buffers: HostBuffers) -> Content:
    """Copies the bytes that this rank writes to a checkpoint into `buffers` and returns them. Not collective.

    `sources` are this rank's tensors, which may change afterwards, and `own` states which bytes of them the rank
    writes. The copy may fail for lack of memory, possibly on this rank only. In that case this function does not raise,
    but iterating over the result raises CheckpointError. So an engine in which all ranks write together can report the
    error to the other ranks.
    """
    devices = {source.tensor.device for source in sources if not source.tensor.is_cpu}
    try:
        memory = buffers.take(copy_bytes(own), pinned=bool(devices))
        copy_to(memory, sources, own)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
    except (RuntimeError, MemoryError, CheckpointError) as error:  # no memory, or a tensor without storage
        return _failing(
            f"cannot copy this rank's {own.num_bytes} bytes to host memory for the background save: "
            f'{type(error).__name__}: {error}. Save with mode = "sync", or leave more memory free'
        )
    return content_in(memory, own)


def _failing(text: str) -> Content:
    yield from ()
    raise CheckpointError(text)
