"""The environment variables that configure Horovod. It reads them once, when it starts."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hpctrain.topology import Topology

# hpctrain's defaults; variables that the user has set take precedence.
SETTINGS = {
    # Fusion joins buffers that are ready at the same moment, so the order of a sum would depend on timing, and a
    # resumed run would differ in the last bit. hpctrain's buckets are fused already.
    "HOROVOD_FUSION_THRESHOLD": "0",
}
# With both of these set, Horovod 0.28.1 crashes when it is started a second time in a process: it writes to its list of
# tunable parameters, which is empty then (`BayesianParameter::SetValue` in its parameter_manager.cc).
_BOTH_SET = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")

# "1" allows groups of ranks to be made after the start. Horovod's threads then exchange the number of groups in every
# cycle: digits trained at 3,800 samples/s on 2 ranks and 2 cores, and at 4,700 with "0".
_LATER_GROUPS = "HOROVOD_DYNAMIC_PROCESS_SETS"

# Horovod's own two-level sums, by their names in the recipe. They apply to every all-reduce of the process.
# If both are switched on, Horovod uses the first. Source: operations.cc of Horovod 0.28.1.
NCCL_VARIABLES = {
    "nccl-hierarchical": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "nccl-torus": "HOROVOD_TORUS_ALLREDUCE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodBuild:
    """Capabilities of a started Horovod.

    nccl: built with NCCL. mpi: runs over MPI, not over Gloo alone. nccl_asked: which of `NCCL_VARIABLES` was switched
    on at its start; Horovod ignores one that it does not support without a message.
    """

    nccl: bool
    mpi: bool
    nccl_asked: str | None


def apply_settings(
    environ: MutableMapping[str, str], *, algorithm: str | None = None, groups: bool = True
) -> None:
    """Adds `SETTINGS` to `environ` where the user has set nothing. Call before Horovod starts.

    groups: allow groups of ranks. Without them Horovod must be restarted before the first group is made; they are
    therefore always allowed if it cannot be restarted.
    algorithm: if in `NCCL_VARIABLES`, it is switched on and the other off; any other name changes nothing.
    """
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
    # Overrides the user's value: groups are made after the start, when the ranks have exchanged their node names.
    environ[_LATER_GROUPS] = "1" if groups or not can_start_again(environ) else "0"
    if algorithm in NCCL_VARIABLES:
        for name, variable in NCCL_VARIABLES.items():
            environ[variable] = "1" if name == algorithm else "0"


def can_start_again(environ: Mapping[str, str]) -> bool:
    """Returns True if Horovod can be stopped and started again in this process."""
    return not all(name in environ for name in _BOTH_SET)


def has_groups(environ: Mapping[str, str]) -> bool:
    """Returns True if `apply_settings` has allowed groups."""
    return environ.get(_LATER_GROUPS) == "1"


def nccl_asked(environ: Mapping[str, str]) -> str | None:
    """Returns which of `NCCL_VARIABLES` is switched on in `environ`, parsed as Horovod does; None if none is."""
    for name, variable in NCCL_VARIABLES.items():
        digits = environ.get(variable, "").strip()
        if digits.lstrip("+").isdecimal() and int(digits) > 0:
            return name
    return None


def why_no_nccl(
    algorithm: str, *, build: HorovodBuild | None, topology: Topology, device_type: str
) -> str | None:
    """Returns the reason why Horovod does not run `algorithm`, one of `NCCL_VARIABLES`; None if it does. Pure.

    build: None if the backend is not Horovod. The reason is a clause for a note; Horovod itself silently runs its
    flat sum. All ranks must have the same build and device.
    """
    if build is None:
        return "only Horovod has it, and the backend is another one"
    if not build.nccl:
        return "this Horovod is built without NCCL (HOROVOD_GPU_OPERATIONS=NCCL when it is built)"
    if device_type != "cuda":
        return f"NCCL sums in the memory of GPUs, the run's device is {device_type}"
    if algorithm == "nccl-hierarchical" and not build.mpi:
        return "Horovod uses MPI between nodes in it, and runs over Gloo here"
    if topology.emulated:
        return "the nodes are emulated, and Horovod counts the real ones"
    if topology.num_nodes == 1:
        return "all ranks are on one node"
    if len({len(ranks) for ranks in topology.ranks_by_node}) > 1:
        return f"it needs equally many ranks on each node, here are {topology.describe()}"
    if build.nccl_asked != algorithm:
        other = f"with {build.nccl_asked}" if build.nccl_asked else "without it"
        return f"Horovod was started {other}, and reads {NCCL_VARIABLES[algorithm]} only when it starts"
    return None


def nccl_in_effect(build: HorovodBuild | None, *, topology: Topology, device_type: str) -> str | None:
    """Returns the algorithm that Horovod's all-reduce runs instead of the flat one, None if it runs that. Pure."""
    asked = build.nccl_asked if build is not None else None
    if asked is None or why_no_nccl(asked, build=build, topology=topology, device_type=device_type):
        return None
    return asked
