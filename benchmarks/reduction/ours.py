"""Ours, as methods of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.reduction.peers import Family, Method
from hpctrain.comm import make_two_level
from hpctrain.topology import Topology


def our_family(world: Any, topology: Topology, *, choices: Sequence[tuple[str, str]]) -> Family:
    """`choices`: pairs of algorithm and wire, by their names in the recipe."""

    def methods(numel: int) -> list[Method]:
        return [
            _ours(world, topology, numel=numel, algorithm=algorithm, wire=wire) for algorithm, wire in choices
        ]

    return Family(name="ours", methods=methods)


BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8}


def _ours(world: Any, topology: Topology, *, numel: int, algorithm: str, wire: str) -> Method:
    gradients = torch.empty(numel)
    buffer = torch.empty(numel, dtype=torch.float16 if wire == "fp16" else torch.float32)
    if algorithm == "flat" or topology.num_nodes == 1:
        sum_up = world.all_reduce
    else:
        sum_up = make_two_level(world, topology).all_reduce

    def reduce() -> None:
        buffer.copy_(gradients)
        sum_up(buffer)
        gradients.copy_(buffer)

    def fill(values: torch.Tensor) -> None:
        gradients.copy_(values)

    return Method(
        name=f"{algorithm}/{wire}", bits=BITS[wire], fill=fill, reduce=reduce, result=lambda: gradients,
        averages=False,
    )  # fmt: skip
