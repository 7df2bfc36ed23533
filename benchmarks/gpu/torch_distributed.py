"""Checks PyTorch's own all-reduce with one rank: whether Gloo and NCCL of this torch work here."""

from __future__ import annotations

import os

import torch
from torch import distributed

from benchmarks.gpu.compare import require, require_equal
from benchmarks.gpu.outcome import Found, NotHere, Setting


def gloo(setting: Setting) -> Found:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return _all_reduce(setting, "gloo", available=distributed.is_gloo_available())


def nccl(setting: Setting) -> Found:
    if not setting.has_gpu:
        raise NotHere("NCCL needs a GPU")
    found = _all_reduce(setting, "nccl", available=distributed.is_nccl_available())
    major, minor, *_ = torch.cuda.nccl.version()
    return Found(text=f"{found.text} (NCCL {major}.{minor})")


def _all_reduce(setting: Setting, backend: str, *, available: bool) -> Found:
    if not available:
        raise NotHere(f"this torch ({torch.__version__}) is built without {backend}")
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        require(distributed.get_world_size() == 1, "the group has other ranks")
        values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(2))
        buffer = values.to(setting.device)
        distributed.all_reduce(buffer)
        require_equal(buffer, values, what=f"the sum over one rank by {backend}")
    finally:
        distributed.destroy_process_group()
    needs = () if setting.has_gpu else ("a GPU's tensor",)
    return Found(text="the sum over one rank is its buffer", needs_gpu=needs)
