"""Which device a rank gets, and whether PyTorch's own all-reduce works here."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from hpctrain.comm import SerialWorld
from hpctrain.errors import LaunchError
from hpctrain.run.compute.device import choose_device, propose
from tests.gpu.check import Check, assert_equal


def test_device(check: Check) -> None:
    """What ranks agree on is tested without a GPU too: tests/unit/run/compute/test_device.py."""
    assert _choose("cpu") == (torch.device("cpu"), None)
    if not check.has_gpu:
        assert _choose("auto")[0] == torch.device("cpu")
        for asked in ("cuda", "cuda:0"):
            with pytest.raises(LaunchError):
                _choose(asked)
        check.found("auto is the CPU, cuda is refused", needs_gpu=["taking a GPU"])
        return
    for asked in ("auto", "cuda", "cuda:0"):
        assert _choose(asked) == (torch.device("cuda", 0), None)
        assert torch.cuda.current_device() == 0, "the device that was chosen is not the current one"
    with pytest.raises(LaunchError):
        _choose(f"cuda:{torch.cuda.device_count()}")
    identity = propose(host_rank=0).uuid
    assert identity
    assert identity == propose(host_rank=0).uuid
    check.found(f"auto, cuda and cuda:0 are {torch.cuda.get_device_name(0)}; a missing one is refused")


def _choose(asked: str) -> tuple[torch.device, str | None]:
    return choose_device(asked, comm=SerialWorld(), hosts=["here"])


def test_gloo(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    _all_reduce(check, "gloo", available=distributed.is_gloo_available())
    check.found("the sum over one rank is its buffer", needs_gpu=["a GPU's tensor"])


def test_nccl(check: Check) -> None:
    if not check.has_gpu:
        pytest.skip("NCCL needs a GPU")
    _all_reduce(check, "nccl", available=distributed.is_nccl_available())
    major, minor, *_ = torch.cuda.nccl.version()
    check.found(f"the sum over one rank is its buffer (NCCL {major}.{minor})")


def _all_reduce(check: Check, backend: str, *, available: bool) -> None:
    if not available:
        pytest.skip(f"this torch ({torch.__version__}) is built without {backend}")
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(2))
        buffer = values.to(check.device)
        distributed.all_reduce(buffer)
        assert_equal(buffer, values, what=f"the sum over one rank by {backend}")
    finally:
        distributed.destroy_process_group()
