"""Which results of operations a checkpointed block keeps, instead of computing them again in backward.

Source: Korthikanti et al. 2022, arXiv:2205.05198 (selective activation recomputation); the mechanism is PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

# Names in `torch.ops.aten`: most of a block's arithmetic is in these. What is left (activation functions,
# normalisation, dropout, copies) takes memory bandwidth only. Which attention runs depends on device, dtype and mask.
_KEPT_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_addmm_activation", "linear", "_scaled_mm",
    "convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a block's forward and of its second computation for `torch.utils.checkpoint.checkpoint`.

    Results of matrix products, convolutions and attention are kept; all others are computed again.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
        create_selective_checkpoint_contexts(_policy)
    )
    return contexts


def keeps(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if the result of `operation(*args, **kwargs)`, of `torch.ops.aten`, is kept.

    Attention with dropout is computed again: what is not computed draws no random numbers, so that later dropouts would
    draw others than in forward.
    """
    if operation not in _kept():
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return float(given) == 0.0
    return True


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = keeps(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _kept() -> frozenset[Any]:
    """Returns the operations of `_KEPT_NAMES`, all their overloads; a name that this PyTorch lacks is left out."""
    packets = [getattr(torch.ops.aten, name) for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())
