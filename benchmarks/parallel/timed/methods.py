"""What is timed: hpctrain's layouts, and the peers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.parallel.layouts import of_figure


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
OURS = {
    method.name: method
    for layout in of_figure("4")
    for wire in layout.timed_wires
    for method in (
        Method(name=f"ours-{layout.name}{'' if wire == 'fp32' else f'-{wire}'}",
               what=f"{layout.what}{'' if wire == 'fp32' else f', {wire}'}", layout=layout.name, wire=wire),
    )
}  # fmt: skip
METHODS = {**OURS, **PEERS}
# On several ranks of several nodes the ranks of all methods, which live at the same time, need too much memory for one
# machine: what is left out is timed with one rank on each node.
_ON_TWO_LEVELS = (
    "ours-none",
    "ours-gradients",
    "ours-parameters-node",
    "ours-tensor-2",
    "ddp",
    "zero",
    "fsdp2",
)


def methods_at(*, num_nodes: int, ranks_per_node: int) -> dict[str, Method]:
    """Returns name -> method, of those that are timed on so many ranks."""
    fitting = {
        layout.name
        for layout in of_figure("4")
        if layout.fits(num_ranks=num_nodes * ranks_per_node, num_nodes=num_nodes)
        and (num_nodes == 1 or ranks_per_node >= layout.ranks_per_node)
    }
    names = METHODS if num_nodes == 1 or ranks_per_node == 1 else _ON_TWO_LEVELS
    return {name: METHODS[name] for name in names if METHODS[name].layout in (None, *fitting)}
