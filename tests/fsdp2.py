"""Tests of what needs an FSDP2 that is newer than the oldest PyTorch that setup.py allows."""

from __future__ import annotations

import pytest


def needs_fsdp2() -> None:
    """Skips the rest of the calling test where FSDP2 is too old to shard parameters, with hpctrain's words for it."""
    from torch import nn

    from hpctrain.distributed.fully_sharded.shard import check_shardable
    from hpctrain.errors import UsageError

    try:
        check_shardable(nn.Linear(2, 2))
    except UsageError as error:
        pytest.skip(str(error))
