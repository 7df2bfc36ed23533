"""Host memory that holds a copy of a rank's state while it is being written in the background."""

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
    """Memory for one save at a time, kept for the next one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._unpin: weakref.finalize[..., torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory held."""
        return self._memory.numel()

    def take(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        """`num_bytes` bytes, shape (num_bytes,), from a block's border on, their content not set. What was taken before
        is used again.

        pinned: for copies from a CUDA device, which are faster into pinned memory and do not wait for each other. Where
        the system pins no more memory they are made all the same, more slowly.
        """
        if num_bytes + BLOCK_BYTES > self._memory.numel() or (pinned and not self._pinned):
            self.release()  # before more is asked for
            self._memory = fresh_tensor((num_bytes + BLOCK_BYTES,), dtype="uint8")
            self._memory.zero_()  # page faults now, not in the first copy of every page
            if pinned:
                self._pinned = True  # or tried: not again with every save
                self._unpin = _pin(self._memory)
        begin = -self._memory.data_ptr() % BLOCK_BYTES
        return self._memory[begin : begin + num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        if self._unpin is not None:
            self._unpin()
        self._unpin, self._pinned = None, False
        self._memory = torch.empty(0, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> weakref.finalize[..., torch.Tensor] | None:
    """Pin CUDA's way, until what is returned is called or `memory` goes. None where the system refuses.

    Not torch's pinned memory: that is rounded up to a power of two, so 33 GiB take 64, and what is freed stays with
    torch for other pinned tensors instead of going back to the system.
    """
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) != 0:
        with suppress(RuntimeError):
            torch.zeros(
                1, device="cuda"
            )  # takes the error, which would else come with the next kernel, whoever's it is
        return None
    unpin = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    unpin.atexit = False  # type: ignore[misc]  # CUDA may be gone by then; typeshed takes it for a slot
    return unpin


def content_copied(sources: Sequence[Item], own: OwnBytes, *, buffers: HostBuffers) -> Content:
    """This rank's bytes as they are now: the tensors may change when this returns. Not collective.

    Where there is no memory for them, perhaps on this rank alone, that is met where the bytes are asked for: so an
    engine that writes with all ranks tells the others, and all hear of it in the next vote.
    """
    devices = {source.tensor.device for source in sources if not source.tensor.is_cpu}
    try:
        memory = buffers.take(copy_bytes(own), pinned=bool(devices))
        copy_to(memory, sources, own)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
    except (RuntimeError, MemoryError, CheckpointError) as error:  # there is no memory, or a tensor has none
        return _failing(
            f"the copy of this rank's {own.num_bytes} bytes, to be saved in the background, cannot be made: "
            f'{type(error).__name__}: {error}. Save with mode = "sync", or leave more memory free'
        )
    return content_in(memory, own)


def _failing(text: str) -> Content:
    yield from ()
    raise CheckpointError(text)
