"""The variables through which Horovod is told how to work. It reads them once, when it starts."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hpctrain.topology import Topology

# What hpctrain wants of Horovod, unless the user has set it.
SETTINGS = {
    # Fusion joins what is ready at the same moment, so the order of a sum would depend on timing, and a
    # resumed run would differ in the last bit. Our buckets are fused already.
    "HOROVOD_FUSION_THRESHOLD": "0",
}
# With both of these set, Horovod 0.28.1 crashes when it is started for the second time in a process: it writes to a
# list of parameters to tune that is empty then (`BayesianParameter::SetValue` in its parameter_manager.cc).
_BOTH_SET = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")

# Whether groups of ranks can be made after the start. With it Horovod's threads tell each other in every cycle how many
# groups there are: digits trained at 3,800 samples/s on 2 ranks and 2 cores, and at 4,700 without.
_LATER_GROUPS = "HOROVOD_DYNAMIC_PROCESS_SETS"

# Horovod's own two-level sums, by their names in the recipe. They hold for every all-reduce of the process.
# Of two that are switched on, Horovod takes the first. Source: operations.cc of Horovod 0.28.1.
NCCL_VARIABLES = {
    "nccl-hierarchical": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "nccl-torus": "HOROVOD_TORUS_ALLREDUCE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodBuild:
    """What a started Horovod can do.

    nccl: built with NCCL. mpi: works over MPI, not over Gloo alone. nccl_asked: which of `NCCL_VARIABLES` it was
    started with; it says nothing itself where it cannot follow one.
    """

    nccl: bool
    mpi: bool
    nccl_asked: str | None


def apply_settings(
    environ: MutableMapping[str, str], *, algorithm: str | None = None, groups: bool = True
) -> None:
    """Put `SETTINGS` into `environ`, where the user has set nothing. Before Horovod starts.

    groups: whether groups of ranks can be made. Without, Horovod has to start anew before the first one, so it is
    started with them wherever it could not.
    algorithm: one of `NCCL_VARIABLES` is switched on and the other off; any other name leaves both as they are.
    """
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
    # Not the user's to choose: groups are made after the start, when the ranks have told each other which
    # node they are on.
    environ[_LATER_GROUPS] = "1" if groups or not can_start_again(environ) else "0"
    if algorithm in NCCL_VARIABLES:
        for name, variable in NCCL_VARIABLES.items():
            environ[variable] = "1" if name == algorithm else "0"


def can_start_again(environ: Mapping[str, str]) -> bool:
    """Whether Horovod can be stopped and started again in this process."""
    return not all(name in environ for name in _BOTH_SET)


def has_groups(environ: Mapping[str, str]) -> bool:
    """Whether groups can be made, after `apply_settings`."""
    return environ.get(_LATER_GROUPS) == "1"


def nccl_asked(environ: Mapping[str, str]) -> str | None:
    """Which of `NCCL_VARIABLES` is switched on in `environ`, by us or by the user. Read as Horovod reads it."""
    for name, variable in NCCL_VARIABLES.items():
        digits = environ.get(variable, "").strip()
        if digits.lstrip("+").isdecimal() and int(digits) > 0:
            return name
    return None


def why_no_nccl(
    algorithm: str, *, build: HorovodBuild | None, topology: Topology, device_type: str
) -> str | None:
    """Why Horovod does not sum as `algorithm`, one of `NCCL_VARIABLES`, says; None if it does. Pure.

    build: None where the backend is not Horovod. The answer is a clause for a note; Horovod itself would run
    its flat sum without a word. All ranks must have the same build and device.
    """
    if build is None:
        return "it is Horovod's, and the backend is another one"
    if not build.nccl:
        return "this Horovod is built without NCCL (HOROVOD_GPU_OPERATIONS=NCCL when it is built)"
    if device_type != "cuda":
        return f"NCCL sums in the memory of GPUs, the run's device is {device_type}"
    if algorithm == "nccl-hierarchical" and not build.mpi:
        return "Horovod sends between nodes over MPI in it, and runs over Gloo here"
    if topology.emulated:
        return "the nodes are emulated, and Horovod counts the real ones"
    if topology.num_nodes == 1:
        return "all ranks are on one node"
    if len({len(ranks) for ranks in topology.ranks_by_node}) > 1:
        return f"it needs as many ranks on each node, here are {topology.describe()}"
    if build.nccl_asked != algorithm:
        other = f"with {build.nccl_asked}" if build.nccl_asked else "without it"
        return f"Horovod was started {other}, and reads {NCCL_VARIABLES[algorithm]} only when it starts"
    return None


def nccl_in_effect(build: HorovodBuild | None, *, topology: Topology, device_type: str) -> str | None:
    """The algorithm that Horovod's all-reduce runs instead of its flat one; None if it runs that. Pure."""
    asked = build.nccl_asked if build is not None else None
    if asked is None or why_no_nccl(asked, build=build, topology=topology, device_type=device_type):
        return None
    return asked
