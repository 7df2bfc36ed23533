"""Releases of PyTorch that are too old for `torch.distributed` over hpctrain."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from hpctrain.distributed.fully_sharded import check_shardable
from hpctrain.errors import LaunchError, UsageError
from hpctrain.run import init
from hpctrain.run.torch_distributed import init_process_group


def test_a_pytorch_that_is_too_old_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with init() as session:
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cu124"))
        with pytest.raises(LaunchError, match=r"needs PyTorch 2.8 or newer, this is 2.6.0\+cu124: update it"):
            init_process_group(session)


def test_an_fsdp2_that_is_too_old_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    with pytest.raises(UsageError, match=r"Use PyTorch 2.13 or newer, or shard = 'gradients'"):
        check_shardable(nn.Linear(2, 2))
