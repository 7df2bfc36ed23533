"""What is timed: hpctrain's layouts and torch's peers of figure 4, and the optimizers of figure 7. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.parallel.layouts import LAYOUTS, of_figure

OUR_INTERFACE = "hpctrain.hvd"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of training that is timed: a layout of hpctrain's, a DistributedOptimizer, or another peer.

    layout: of hpctrain's, or None. interface: the module whose `DistributedOptimizer` a Horovod script uses; empty if
    it is no Horovod script. mpi: settings of Open MPI that its user makes, names in `programs.OPEN_MPI`.
    wire: of the gradients. divides_samples: whether several ranks compute one sample together: tensor groups and
    pipelines. They are held against each other only.
    """

    name: str
    what: str
    layout: str | None = None
    interface: str = ""
    mpi: tuple[str, ...] = ()
    wire: str = "fp32"
    divides_samples: bool = False

    @property
    def is_ours(self) -> bool:
        return self.layout is not None or self.interface == OUR_INTERFACE


PEERS = {
    method.name: method
    for method in (
        Method(name="ddp", what="DDP"),
        Method(name="ddp-fp16", what="DDP, fp16 hook", wire="fp16"),
        Method(name="zero", what="DDP and ZeroRedundancyOptimizer"),
        Method(name="fsdp2", what="FSDP2"),
        Method(name="tensor", what="tensor groups of 2 by parallelize_module", divides_samples=True),
        Method(
            name="pipeline", what="pipeline of 2, 1F1B of torch.distributed.pipelining", divides_samples=True
        ),
    )
}
OURS = {
    method.name: method
    for layout in of_figure("4")
    for wire in layout.timed_wires
    for method in (
        Method(name=f"ours-{layout.name}{'' if wire == 'fp32' else f'-{wire}'}",
               what=f"{layout.what}{'' if wire == 'fp32' else f', {wire}'}", layout=layout.name, wire=wire,
               divides_samples=layout.tensor * layout.pipeline > 1),
    )
}  # fmt: skip
METHODS = {**OURS, **PEERS}


_OF_OPEN_MPI = {"ring": "with Open MPI's ring", "yielding": "yielding"}


def _optimizers(wire: str) -> list[Method]:
    """Returns those of figure 7 with one wire: hpctrain's, and Horovod's as it comes and with settings of Open MPI."""
    suffix, sent = ("", "") if wire == "fp32" else (f"-{wire}", f", {wire}")
    ours = Method(name=f"hvd{suffix}", what=f"hpctrain.hvd{sent}", interface=OUR_INTERFACE, wire=wire)
    choices: list[tuple[str, ...]] = [(), ("ring",), ("yielding",), ("ring", "yielding")]
    theirs = [
        Method(
            name="-".join(["horovod", *chosen]) + suffix,
            what=", ".join([f"horovod.torch{sent}", *(_OF_OPEN_MPI[one] for one in chosen)]),
            interface="horovod.torch",
            mpi=chosen,
            wire=wire,
        )
        for chosen in choices
    ]
    return [ours, *theirs]


# Of figure 7, by wire: those with different wires do not take turns, nothing compares them.
OPTIMIZERS_IN_TURNS = [_optimizers("fp32"), _optimizers("fp16")]
OPTIMIZERS = {method.name: method for methods in OPTIMIZERS_IN_TURNS for method in methods}
# On several ranks of several nodes the ranks of all methods, which live at the same time, need too much memory for one
# machine: what is left out is timed with one rank on each node.
_ON_TWO_LEVELS = (
    "ours-none",
    "ours-gradients",
    "ours-parameters-node",
    "ours-tensor-2",
    "ours-pipeline-2",
    "ddp",
    "zero",
    "fsdp2",
    "tensor",
    "pipeline",
)


def methods_at(*, num_nodes: int, ranks_per_node: int) -> dict[str, Method]:
    """Returns name -> method, of those that are timed on so many ranks."""
    fitting = {
        layout.name
        for layout in of_figure("4")
        if layout.fits(num_ranks=num_nodes * ranks_per_node, num_nodes=num_nodes)
        and (num_nodes == 1 or ranks_per_node >= layout.ranks_per_node)
    }
    peers = {LAYOUTS[name].peer for name in fitting}
    names = METHODS if num_nodes == 1 or ranks_per_node == 1 else _ON_TWO_LEVELS
    return {
        name: method
        for name, method in ((name, METHODS[name]) for name in names)
        if method.layout in fitting
        or (method.layout is None and (name in peers or not method.divides_samples))
    }


def in_turns(methods: Mapping[str, Method]) -> list[list[Method]]:
    """Returns the groups of methods whose ranks live at the same time and that take turns, in the order of the names.

    Two groups, so that fewer ranks need memory at the same time: nothing compares methods of different groups.
    """
    groups = ([m for m in methods.values() if m.divides_samples == divides] for divides in (False, True))
    return [group for group in groups if group]
