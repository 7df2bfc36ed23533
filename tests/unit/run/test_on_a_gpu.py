"""What is decided for a GPU, as far as it can be tested without one: CUDA's answers are given here.

The real ones are asked by `make check-gpu`, on a machine that has a GPU.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint import HostBuffers
from hpctrain.errors import RecipeError
from hpctrain.run.compute.device import autocast_for


class Runtime:
    """CUDA's runtime. refused: it pins nothing."""

    def __init__(self, *, refused: bool = False) -> None:
        self.refused = refused
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if self.refused:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_the_copy_of_a_background_save_pins_its_own_memory_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = HostBuffers()
    memory = buffers.take(5 << 20, pinned=True)
    assert list(runtime.pinned.values()) == [buffers.num_bytes]
    assert buffers.num_bytes < 6 << 20  # torch's own pinned memory would be of 8 MiB
    (address,) = runtime.pinned
    assert address <= memory.data_ptr() < address + buffers.num_bytes
    assert buffers.take(4 << 20, pinned=True).data_ptr() == memory.data_ptr()
    buffers.take(9 << 20, pinned=True)
    assert list(runtime.pinned.values()) == [buffers.num_bytes]
    buffers.release()
    assert runtime.pinned == {}
    buffers.take(1 << 20, pinned=True)
    del buffers
    assert runtime.pinned == {}


def test_where_nothing_can_be_pinned_the_copy_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(refused=True))

    def kernel(*shape: int, device: str) -> torch.Tensor:
        raise RuntimeError(
            "CUDA error: out of memory"
        )  # of the pinning: CUDA reports it with the next kernel

    monkeypatch.setattr(torch, "zeros", kernel)
    buffers = HostBuffers()
    first = buffers.take(5 << 20, pinned=True)
    assert first.shape == (5 << 20,)
    assert buffers.take(5 << 20, pinned=True).data_ptr() == first.data_ptr()  # not made anew for each save


def test_a_gpu_that_only_emulates_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # so says torch of one
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: (7, 5))
    with pytest.raises(RecipeError, match="this GPU has no bfloat16 arithmetic"):
        autocast_for("bf16", device=device)
    autocast_for("fp16", device=device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: (8, 0))
    autocast_for("bf16", device=device)
