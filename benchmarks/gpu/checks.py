"""The checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu import checkpoints, device, parallel, streams, torch_distributed, training, two_ranks
from benchmarks.gpu.outcome import Check

CHECKS: Mapping[str, Check] = {
    "device": device.device_choice,
    "streams": streams.reduction_streams,
    "pinned": streams.pinned_copies,
    "ahead": streams.batches_ahead,
    "fp16": training.fp16,
    "bf16": training.bf16,
    "memory": training.memory,
    "checkpoints": checkpoints.checkpoints,
    "reductions": two_ranks.reductions,
    "updater": two_ranks.updater,
    "profile": two_ranks.profile,
    "digits": two_ranks.digits,
    "gloo": torch_distributed.gloo,
    "nccl": torch_distributed.nccl,
    "sharded": parallel.sharded,
    "recomputed": parallel.recomputed,
    "largest": parallel.largest,
}
