"""What `torch.distributed` over hpctrain asks of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from hpctrain.errors import LaunchError
from hpctrain.run import start
from hpctrain.run.torch_distributed.initialize import init_process_group


def test_a_pytorch_that_is_too_old_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as session:
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.5.1"))
        with pytest.raises(LaunchError, match=r"needs PyTorch 2.6 or newer, this is 2.5.1: update it"):
            init_process_group(session)
