"""The layouts of a model over the ranks that are measured, and the peers. Pure.

A new layout is one line in `LAYOUTS`: every figure measures all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.distributed import ParallelPlan

BITS = {"fp32": 32, "fp16": 16, "int8": 8}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on the ranks.

    bytes_a_parameter: of a rank, with AdamW in float32, by the number of ranks that share a copy of the model.
    sent: bytes that a rank sends in a step / bytes of the parameters in float32, by the number of ranks and the bits
    of a gradient on the wire; of a layout on `nodes` the bytes that leave a node, by the number of nodes.
    peer: name of the peer that holds as much on a rank. wires: wire formats of its gradients.
    nodes: whether it needs several nodes; each holds a copy of the model.
    """

    name: str
    what: str
    plan: ParallelPlan
    bytes_a_parameter: Callable[[int], float]
    sent: Callable[[int, int], float]
    peer: str
    wires: tuple[str, ...] = ("fp32",)
    nodes: bool = False


def _all_reduced(num: int, bits: int) -> float:
    return 2 * (num - 1) / num * bits / 32


def _gathered_twice(num: int, bits: int) -> float:
    """Parameters are gathered for forward and for backward, gradients are reduced to their owners."""
    return (num - 1) / num * (2 + bits / 32)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="none", what="whole copies", plan=ParallelPlan(), bytes_a_parameter=lambda n: 16,
               sent=_all_reduced, peer="ddp", wires=("fp32", "fp16", "int8")),
        Layout(name="parameters", what="parameters sharded", plan=ParallelPlan(shard="parameters"),
               bytes_a_parameter=lambda n: 16 / n, sent=_gathered_twice, peer="fsdp2"),
        Layout(name="parameters-node", what="parameters sharded within a node",
               plan=ParallelPlan(shard="parameters", shard_within="node"), bytes_a_parameter=lambda n: 16 / n,
               sent=_all_reduced, peer="fsdp2", nodes=True),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of training that is timed: a layout of hpctrain's, or a peer (layout is None). wire: of the gradients."""

    name: str
    what: str
    layout: str | None = None
    wire: str = "fp32"


PEERS = {
    method.name: method
    for method in (
        Method(name="ddp", what="DDP"),
        Method(name="ddp-fp16", what="DDP, fp16 hook", wire="fp16"),
        Method(name="zero", what="DDP and ZeroRedundancyOptimizer"),
        Method(name="fsdp2", what="FSDP2"),
    )
}
# Not timed: there is no peer with as few bits.
UNTIMED_WIRES = ("int8",)


def timed_methods(*, several_nodes: bool) -> dict[str, Method]:
    """Returns name -> method: the layouts with each wire, and the peers."""
    ours = [
        Method(name=f"ours-{layout.name}{'' if wire == 'fp32' else f'-{wire}'}",
               what=f"{layout.what}{'' if wire == 'fp32' else f', {wire}'}", layout=layout.name, wire=wire)
        for layout in LAYOUTS.values()
        if several_nodes or not layout.nodes
        for wire in layout.wires
        if wire not in UNTIMED_WIRES
    ]  # fmt: skip
    return {method.name: method for method in (*ours, *PEERS.values())}
