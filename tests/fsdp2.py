"""What tests leave out where FSDP2 is too old to shard parameters, which the oldest PyTorch of setup.py is."""

from __future__ import annotations


def fsdp2_refusal() -> str:
    """Returns with which words hpctrain refuses this PyTorch's FSDP2, or ""."""
    from torch import nn

    from hpctrain.distributed.fully_sharded import check_shardable
    from hpctrain.errors import UsageError

    try:
        check_shardable(nn.Linear(2, 2))
    except UsageError as error:
        return str(error)
    return ""


def needs_fsdp2() -> None:
    """Skips the rest of the calling test, with the words of the refusal."""
    import pytest

    if words := fsdp2_refusal():
        pytest.skip(words)
