"""How a model is split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hpctrain.errors import UsageError

Shard: TypeAlias = Literal["none", "optimizer", "gradients", "parameters"]
Within: TypeAlias = Literal["world", "node"]
Checkpointing: TypeAlias = Literal["none", "blocks", "selective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """How a model is split.

    shard: `none`, every rank holds all of it; `optimizer`, each rank holds a part of the optimizer state (ZeRO-1);
    `gradients`, of the gradients too (ZeRO-2); `parameters`, of the parameters too (ZeRO-3). shard_within: parts over
    all ranks (`world`), or, of parameters, over the ranks of a node, with a replica on each node (`node`, HSDP).
    activation_checkpointing: `blocks`, backward computes the forward of the repeated blocks again; `selective`, all of
    it but matrix products, convolutions and attention; or `none`.
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
        if self.shard in ("optimizer", "gradients") and self.shard_within == "node":
            raise UsageError(
                f"shard_within is 'node' with shard = {self.shard!r}, whose parts are over all ranks: leave it out, or "
                "use shard = 'parameters'"
            )
