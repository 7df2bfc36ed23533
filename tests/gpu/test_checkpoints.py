"""Checkpoints of tensors on a device, saved synchronously and in the background."""

from __future__ import annotations

import time
from statistics import median

import torch

from hpctrain.checkpoint import HostBuffers, Replicated, SaveMode, Saver, SaveResult, State, load, saving_into
from hpctrain.comm import SerialWorld
from tests.gpu.check import Check, LongKernels, assert_equal

SAVES = 3


def test_checkpoints(check: Check) -> None:
    """A checkpoint holds the values at the call of `save`: kernels that compute them are still running
    then, and kernels that change them are queued directly after."""
    comm = SerialWorld()
    work = LongKernels(check)
    originals = _state(check)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in originals.values())
    stalls: dict[str, list[float]] = {}
    for mode in (SaveMode.SYNC, SaveMode.ASYNC):
        saved: list[SaveResult] = []
        begun = saving_into(check.scratch / mode.value, comm=comm)
        with Saver(begun, comm=comm, mode=mode, on_saved=saved.append) as saver:
            for step in range(1, SAVES + 1):
                tensors = {name: tensor.to(check.device) for name, tensor in originals.items()}
                made = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
                check.wait()
                work.run()
                for name, tensor in tensors.items():
                    made[name].copy_(tensor)
                items = [Replicated(name=name, tensor=tensor) for name, tensor in made.items()]
                items.append(Replicated(name="on_host", tensor=torch.arange(7)))
                saver.save(State(items=items, document={"step": step}), step=step)
                for tensor in made.values():  # queued directly after the save, as the next step's kernels are
                    tensor.zero_()
                saver.finish()
                _, found = load(saved[-1].path, comm=comm)
                for name, tensor in originals.items():
                    assert_equal(found[name], tensor, what=f"{name}, saved {mode.value}, save {step}")
                assert_equal(found["on_host"], torch.arange(7), what=f"on_host, saved {mode.value}")
            held = saver.buffer_bytes
        stalls[mode.value] = [one.stall_s for one in saved]
    assert num_bytes <= held <= num_bytes + (1 << 20) * len(originals), (
        f"{num_bytes} bytes are copied to {held}"
    )
    text = (
        f"{SAVES} saves of {len(originals)} tensors, at once and in the background, are the CPU's to the bit"
    )
    check.found(text, needs_gpu=["copies from a GPU into pinned memory"])
    check.figures |= {
        "MB": num_bytes / 1e6,
        "ms stall, at once": 1e3 * median(stalls["sync"][1:]),
        "ms stall, in the background, first": 1e3 * stalls["async"][0],
        "ms stall, in the background, later": 1e3 * median(stalls["async"][1:]),
    }
    if check.has_gpu:
        check.figures["GB/s of a copy into pinned memory"] = _copy_rate(check, num_bytes=num_bytes)
        check.figures["copy's memory is pinned (1) or not (0)"] = _is_pinned()


def _state(check: Check) -> dict[str, torch.Tensor]:
    """Returns CPU tensors of many kinds: large and small, of every element size, not contiguous, empty, with one
    element."""
    generator = torch.Generator().manual_seed(3)
    rows = check.of(gpu=8192, cpu=64)
    found = {
        f"large/{number}": torch.randn(rows, 2048, generator=generator) for number in range(4)
    }  # 64 MiB each on a GPU
    found["transposed"] = torch.randn(64, rows, generator=generator).T
    found["half"] = torch.randn(rows, 16, generator=generator).half()
    found["bfloat16"] = torch.randn(1001, generator=generator).bfloat16()
    found["double"] = torch.randn(1001, generator=generator).double()
    found["steps"] = torch.tensor(5)
    found["mask"] = torch.randn(777, generator=generator) > 0
    found["empty"] = torch.empty(0, 4)
    return found | {f"small/{number}": torch.randn(number + 1, generator=generator) for number in range(100)}


def _is_pinned() -> float:
    """Returns 1.0 if the host copy is in pinned memory, else 0.0 (some systems cannot pin memory). Takes the memory,
    returns it and takes it again, as two savers would. Asserts that a copy into it is right."""
    buffers = HostBuffers()
    found = []
    for _ in range(2):
        memory = buffers.take(33 << 20, pinned=True)
        found.append(memory.is_pinned())
        memory.copy_(torch.ones(memory.numel(), dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert bool((memory == 1).all()), "a copy into the host's memory has wrong values"
        del memory
        buffers.release()
    return float(all(found))


def _copy_rate(check: Check, *, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=check.device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(3):
        check.wait()
        begun_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun_s)
    return num_bytes / min(times) / 1e9
