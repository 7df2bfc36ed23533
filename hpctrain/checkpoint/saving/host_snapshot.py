"""Copy of a rank's state in host memory, from which a background save writes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import final

import torch

from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES
from hpctrain.checkpoint.files.huge_pages import fresh_tensor
from hpctrain.checkpoint.format.state import Item
from hpctrain.checkpoint.planning.rank_extents import Content, OwnBytes, content_in, copy_bytes, copy_to
from hpctrain.errors import CheckpointError


@final
class HostBuffers:
    """Host memory for the snapshot of one save at a time; reused by the next save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._unpin: weakref.finalize[..., torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory allocated, in bytes."""
        return self._memory.numel()

    def take(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Returns uninitialized memory: uint8, shape (num_bytes,), aligned to BLOCK_BYTES. It is the same memory as
        that of the call before, if that is large enough.

        pinned: pin the memory, so that copies from a CUDA device are faster and asynchronous. If the system refuses,
        the memory stays unpinned. Raises CheckpointError if there is not enough memory.
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
        """Frees the memory."""
        if self._unpin is not None:
            self._unpin()
        self._unpin, self._pinned = None, False
        self._memory = torch.empty(0, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> weakref.finalize[..., torch.Tensor] | None:
    """Pins `memory` with cudaHostRegister. Returns the function that unpins it, which also runs when `memory` is
    freed; None if the system refuses.

    Not torch's pinned memory: its allocator rounds sizes up to a power of two (33 GiB take 64), and keeps freed memory
    for other pinned tensors instead of returning it to the system.
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
    """Copies this rank's bytes into `buffers` and returns them as content; afterwards the tensors may change. Not
    collective.

    If the copy fails for lack of memory, possibly on this rank only, iterating the result raises CheckpointError
    instead of this function: so an engine in which all ranks write together reports it to the others.
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
