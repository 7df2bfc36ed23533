"""Kernels that run long enough to reveal a missing wait, and a model to train."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.gpu.outcome import CheckFailed, Setting

LONG_S = 0.03


class LongKernels:
    """`run` queues some 30 ms of work on the current stream of a GPU; on a CPU it computes for a moment."""

    def __init__(self, setting: Setting) -> None:
        size = setting.of(gpu=2048, cpu=32)
        self._matrix = (
            torch.randn(size, size, device=setting.device, generator=_generator(setting.device)) / size**0.5
        )
        self._repeats = 1
        if setting.has_gpu:
            self.run()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._repeats = 10
            self.run()
            end.record()
            torch.cuda.synchronize()
            self._repeats = max(10, int(LONG_S * 10 / (begin.elapsed_time(end) / 1e3)))

    def run(self) -> None:
        product = self._matrix
        for _ in range(self._repeats):
            product = product @ self._matrix


def control_sees_a_race(setting: Setting, work: LongKernels) -> None:
    """Raises CheckFailed unless a copy without a wait reads old values; otherwise the checks of streams would prove
    nothing."""
    values = torch.arange(1 << 16, dtype=torch.float32, device=setting.device)
    late = torch.zeros_like(values)
    torch.cuda.synchronize()
    work.run()
    late.copy_(values)
    with torch.cuda.stream(torch.cuda.Stream(setting.device)):
        early = late.clone()
    torch.cuda.synchronize()
    if torch.equal(early, values):
        raise CheckFailed(
            "a copy on a stream that waits for nothing found the new values: the kernels are too short"
        )


def small_model(*, width: int, depth: int) -> nn.Sequential:
    """Returns a model with equal parameters at every call."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
