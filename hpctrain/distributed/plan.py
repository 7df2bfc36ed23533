"""How a model is split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hpctrain.errors import UsageError

Shard: TypeAlias = Literal["none", "parameters"]
Within: TypeAlias = Literal["world", "node"]
Checkpointing: TypeAlias = Literal["none", "blocks", "selective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """How a model is split.

    shard: `none`, every rank holds all of it; `parameters`, each rank holds a part of the parameters, gradients and
    optimizer state (ZeRO-3). shard_within: parts over all ranks (`world`), or over the ranks of a node, with a replica
    on each node (`node`, HSDP). activation_checkpointing: `blocks`, backward computes the forward of the repeated
    blocks again; `selective`, all of it but matrix products, convolutions and attention; or `none`.
    Raises UsageError for other values.
    """

    shard: Shard = "none"
    shard_within: Within = "world"
    activation_checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        given = (self.shard, self.shard_within, self.activation_checkpointing)
        names = ("shard", "shard_within", "activation_checkpointing")
        for name, value, kind in zip(names, given, (Shard, Within, Checkpointing), strict=True):
            if value not in get_args(kind):
                raise UsageError(f"{name} is {value!r}: choose {' or '.join(get_args(kind))}")
