"""Starts, configures and stops Horovod in this process. The only module of hpctrain that imports horovod."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, final

import torch

from hpctrain.comm.backends.horovod_group import HorovodGroup
from hpctrain.comm.backends.serial_world import SerialGroup
from hpctrain.comm.interface.buffer_checks import (
    MAX_CHUNK_ELEMS,
)
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CommunicationError, LaunchError
from hpctrain.topology import Topology

# hpctrain's defaults for Horovod's variables, which it reads once, when it starts. The user's values have precedence.
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
    """Capabilities of the loaded Horovod.

    nccl: True if Horovod is built with NCCL.
    mpi: True if Horovod runs over MPI, and not over Gloo alone.
    nccl_asked: two-level algorithm that was switched on when Horovod started: `nccl-hierarchical`, `nccl-torus` or
    None. Horovod silently ignores algorithms that it does not support.
    """

    nccl: bool
    mpi: bool
    nccl_asked: str | None


def apply_settings(
    environ: MutableMapping[str, str], *, algorithm: str | None = None, groups: bool = True
) -> None:
    """Adds hpctrain's defaults for Horovod's environment variables to `environ`. Call it before Horovod starts.

    Variables that the user has set are kept, except those for groups and for `algorithm`.

    algorithm: `nccl-hierarchical` or `nccl-torus` switches this algorithm of Horovod on and the other one off; any
    other value changes nothing.
    groups: True to let Horovod create groups of ranks after it has started. If False, Horovod must be restarted before
    the first group is created; if Horovod cannot be restarted, False therefore has the same effect as True.
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
    """Returns True if `environ` lets Horovod create groups of ranks after its start; see `apply_settings`."""
    return environ.get(_LATER_GROUPS) == "1"


def nccl_asked(environ: Mapping[str, str]) -> str | None:
    """Returns the two-level algorithm that Horovod's variables in `environ` switch on, or None.

    The result is a key of `NCCL_VARIABLES`. The values are parsed as Horovod parses them.
    """
    for name, variable in NCCL_VARIABLES.items():
        digits = environ.get(variable, "").strip()
        if digits.lstrip("+").isdecimal() and int(digits) > 0:
            return name
    return None


def why_no_nccl(
    algorithm: str, *, build: HorovodBuild | None, topology: Topology, device_type: str
) -> str | None:
    """Returns the reason why Horovod does not run its two-level `algorithm`; None if Horovod runs it. Pure.

    The reason is a clause for a note to the user, because Horovod runs its flat sum instead without saying so. All
    ranks must have the same build and device.

    algorithm: a key of `NCCL_VARIABLES`: `nccl-hierarchical` or `nccl-torus`.

    build: Horovod's capabilities; None if the backend is not Horovod.
    """
    if build is None:
        return "only Horovod provides it, and this run uses another backend"
    if not build.nccl:
        return "this Horovod was built without NCCL (set HOROVOD_GPU_OPERATIONS=NCCL when you build it)"
    if device_type != "cuda":
        return f"NCCL needs GPUs, but the run's device is {device_type}"
    if algorithm == "nccl-hierarchical" and not build.mpi:
        return "with it Horovod communicates between nodes over MPI, but here Horovod runs over Gloo"
    if topology.emulated:
        return "the nodes are emulated, but Horovod sees only the real ones"
    if topology.num_nodes == 1:
        return "all ranks are on one node"
    if len({len(ranks) for ranks in topology.ranks_by_node}) > 1:
        return f"it needs the same number of ranks on each node, but this run has {topology.describe()}"
    if build.nccl_asked != algorithm:
        other = f"with {build.nccl_asked}" if build.nccl_asked else "without it"
        return f"Horovod was started {other}, and reads {NCCL_VARIABLES[algorithm]} only when it starts"
    return None


def nccl_in_effect(build: HorovodBuild | None, *, topology: Topology, device_type: str) -> str | None:
    """Returns the two-level algorithm that Horovod's all-reduce runs; None for the flat algorithm. Pure."""
    asked = build.nccl_asked if build is not None else None
    if asked is None or why_no_nccl(asked, build=build, topology=topology, device_type=device_type):
        return None
    return asked


# Starting and stopping Horovod in this process.


def load_horovod() -> Any:
    """Returns the module horovod.torch without starting Horovod. Raises LaunchError if it cannot be loaded."""
    try:
        import horovod.torch as hvd
    except (ImportError, OSError, RuntimeError) as error:
        raise LaunchError(
            f"Horovod cannot be loaded ({error}): build it (make setup), or choose the backend mpi"
        ) from error
    return hvd


def _start(hvd: Any) -> None:
    """Starts Horovod. Collective over all ranks. Raises LaunchError if it does not start."""
    try:
        hvd.init()
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"Horovod does not start: {error}") from error


@final
class RunningHorovod:
    """The running Horovod of this process, and what the worlds over it share: process sets and communicator numbers."""

    def __init__(self, hvd: Any, *, chunk_elems: int, owned: bool) -> None:
        """Creates the object. Use `start` instead.

        hvd: the initialized module horovod.torch.
        owned: True if Horovod is to be stopped when the last world is closed.
        """
        self.hvd = hvd
        self.chunk_elems = chunk_elems
        self.running = True
        self._owned = owned
        self._num_worlds = 0
        self._num_made = 0
        self._process_sets: dict[tuple[int, ...], Any] = {}

    @classmethod
    def start(cls, hvd: Any, *, chunk_elems: int = MAX_CHUNK_ELEMS) -> RunningHorovod:
        """Starts Horovod, unless the user's script has started it. Collective over all ranks.

        If the script has started Horovod, hpctrain leaves Horovod running at the end, since the script may still use
        it. Raises LaunchError if Horovod does not start.
        """
        owned = not hvd.is_initialized()
        _start(hvd)
        return cls(hvd, chunk_elems=chunk_elems, owned=owned)

    def add_world(self) -> None:
        """Registers a world, which must call `close_world` once. Every rank calls it."""
        self._num_worlds += 1

    def close_world(self) -> None:
        """Unregisters a world. If it was the last world, stops Horovod, provided that Horovod can be started again.

        Collective over all ranks.
        """
        self._num_worlds -= 1
        if self._num_worlds == 0 and can_start_again(os.environ):
            self.stop()

    def stop(self) -> None:
        """Stops Horovod's thread if it is running and hpctrain has started it. Collective over all ranks."""
        if not self.running:
            return
        self.running = False
        if not self._owned:
            return
        # The first rank that shuts down ends Horovod on all ranks, also on one that still frees communicators or
        # memory: this all-reduce is a barrier. It fails if a rank has left without closing, which ended Horovod.
        # A fixed name, so that the ranks meet here even if their operation counters differ.
        with contextlib.suppress(self.hvd.mpi_ops.HorovodInternalError, ValueError):
            self.hvd.allreduce(torch.zeros(1, dtype=torch.int32), name="hpctrain.close", op=self.hvd.Sum)
        self.hvd.shutdown()

    def next_number(self) -> int:
        """Returns the next number for a communicator's name. Every rank calls it for each communicator."""
        self._num_made += 1
        return self._num_made

    def group(self, members: tuple[int, ...], *, number: int) -> Collective:
        """Returns a communicator over `members`, which must include this rank and have a process set already."""
        if len(members) == 1:
            return SerialGroup(member=members[0], backend="horovod")
        return HorovodGroup(
            self.hvd,
            process_set=self.process_set(members),
            members=members,
            name=f"{number}",
            chunk_elems=self.chunk_elems,
        )

    def _allow_groups(self) -> None:
        """Restarts Horovod if it was started without groups. Collective over all ranks; nothing may be in flight."""
        if not self._owned or has_groups(os.environ):
            return
        self.stop()
        apply_settings(os.environ)
        _start(self.hvd)
        self.running = True

    def process_set(self, members: tuple[int, ...]) -> Any:
        """Returns the process set of these ranks; the first call for them creates it. Collective over all ranks.

        Raises CommunicationError if Horovod cannot create the process set.
        """
        ranks = tuple(sorted(members))
        if len(ranks) == self.hvd.size():
            return self.hvd.global_process_set
        if ranks not in self._process_sets:
            self._allow_groups()
            # Horovod allows one process set per set of ranks; communicators over it differ by name.
            try:
                self._process_sets[ranks] = self.hvd.add_process_set(list(ranks))
            except (ValueError, RuntimeError) as error:
                raise CommunicationError(
                    f"Horovod cannot make a group of ranks {list(ranks)} ({error}): if the script calls hvd.init() "
                    "before hpctrain, remove that call, or set HOROVOD_DYNAMIC_PROCESS_SETS=1 before it"
                ) from error
        return self._process_sets[ranks]
