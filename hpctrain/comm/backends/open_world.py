"""Opens the requested backend, or the best available backend."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.backends.running_horovod import NCCL_VARIABLES, HorovodBuild
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.collectives.agreement import all_gather_json, describe_ranks, raise_together
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import (
    YIELD_VARIABLE,
    RankIdentity,
    cross_check,
    identify,
    in_effect,
    read_surroundings,
    why_not_alone,
)

BACKENDS = ("auto", "horovod", "mpi", "serial")
INSTALL = "install one of them in the environment that every rank uses (make setup builds both)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorld:
    """The result of `open_world`.

    world: the world.
    reason: why this backend was chosen, as a clause; empty if the user chose it.
    notes: messages for the user about backends that could not be used.
    horovod: capabilities of the loaded Horovod; None if the backend is not Horovod.
    """

    world: World
    reason: str = ""
    notes: tuple[str, ...] = ()
    horovod: HorovodBuild | None = None


def open_world(
    backend: str = "auto",
    *,
    identity: RankIdentity | None = None,
    algorithm: str | None = None,
    device: str = "auto",
) -> OpenedWorld:
    """Connects this process to the other ranks. Collective over all ranks that the launcher started.

    backend: `serial`, `mpi`, `horovod` or `auto`. `horovod` uses Horovod for its own reductions and MPI for everything
    else, if Horovod is built with MPI and mpi4py is installed. `auto` chooses serial for one rank; for several ranks
    MPI, together with Horovod if gradients are on GPUs and Horovod has NCCL (docs/adr/0023); and Horovod alone if
    mpi4py is missing.
    identity: rank of this process and number of ranks; None to read both from the environment.
    algorithm: the recipe's reduction algorithm. Horovod's own algorithms must be set when it starts (see
    `running_horovod.why_no_nccl`).
    device: the recipe's device; with `cpu`, GPUs are ignored.

    Raises UsageError for an unknown backend; LaunchError if the backend cannot be loaded or does not match the number
    of ranks, or if a container hides other ranks; TopologyError if the backend and the launcher disagree on the number
    of ranks.
    """
    if identity is None:
        identity = identify(os.environ, socket.gethostname())
    if backend not in BACKENDS:
        hint = (
            "; threads are for tests: hpctrain.comm.backends.threads_world.run_threads"
            if backend == "threads"
            else ""
        )
        raise UsageError(f"no communication backend {backend!r}: choose {', '.join(BACKENDS)}{hint}")
    if backend == "serial" and identity.num_ranks > 1:
        raise LaunchError(
            f"the backend serial is for one rank, but {identity.launcher} started {identity.num_ranks}: "
            "choose auto, horovod or mpi, or start one rank"
        )
    hidden = why_not_alone(os.environ, read_surroundings(os.environ)) if backend != "serial" else None
    if hidden is not None:
        raise LaunchError(hidden)
    if backend == "serial" or (backend == "auto" and identity.num_ranks == 1):
        return OpenedWorld(world=SerialWorld(), reason="one rank")
    if backend == "horovod":
        opened = _open_horovod(identity, algorithm)
    elif backend == "mpi":
        opened = OpenedWorld(world=_open_mpi(identity))
    else:
        opened = _open_best(identity, algorithm, device)
    _check_count(identity, opened.world)
    return opened


def why_no_horovod() -> str | None:
    """Loads Horovod without starting it. Returns the reason why that failed; None if Horovod was loaded."""
    from hpctrain.comm.backends.running_horovod import load_horovod

    try:
        load_horovod()
    except LaunchError as error:
        return str(error)
    return None


def yield_while_idle(environ: MutableMapping[str, str], *, identity: RankIdentity, num_cores: int) -> None:
    """Makes Open MPI yield the core while it waits, unless the user has set `YIELD_VARIABLE`.

    Call it before MPI starts. Horovod's thread waits inside MPI on a core that also computes: with yielding, two ranks
    on two cores train 1.4 to 2.1 times as fast. If there are more ranks than cores, yielding needs a preloaded library
    (docs/adr/0024).
    """
    if (identity.host_size or 1) <= num_cores or in_effect():
        environ.setdefault(YIELD_VARIABLE, "1")


def _open_mpi(identity: RankIdentity) -> World:
    from hpctrain.comm.backends.mpi_world import MpiWorld

    world = MpiWorld.open()
    # Check before the first message: ranks that MPI started as separate worlds of one would wait forever.
    _check_count(identity, world)
    return world


def _check_count(identity: RankIdentity, world: World) -> None:
    container = read_surroundings(os.environ).container
    mpi: Any = sys.modules.get("mpi4py.MPI")
    library = "" if mpi is None else mpi.Get_library_version().splitlines()[0].partition(",")[0].strip("\0 ")
    cross_check(identity, mpi_rank=world.rank, mpi_size=world.num_ranks, container=container, library=library)


def _open_horovod(identity: RankIdentity, algorithm: str | None) -> OpenedWorld:
    from hpctrain.comm.backends.running_horovod import load_horovod

    yield_while_idle(os.environ, identity=identity, num_cores=os.cpu_count() or 1)
    if _has_mpi4py() and os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() == "mpi":
        failed = why_no_horovod()
        if failed is not None or load_horovod().mpi_built():
            mpi = _open_mpi(identity)
            raise_together(mpi, None if failed is None else LaunchError(failed))
            return _over_mpi(mpi, algorithm)
    return _open_horovod_alone(algorithm)


def _over_mpi(mpi: World, algorithm: str | None, *, reason: str = "") -> OpenedWorld:
    from hpctrain.comm.backends.horovod_world import HorovodOverMpi
    from hpctrain.comm.backends.running_horovod import load_horovod

    world = HorovodOverMpi(mpi, hvd=load_horovod(), algorithm=algorithm)
    return OpenedWorld(world=world, reason=reason, horovod=world.build)


def _open_horovod_alone(algorithm: str | None, *, reason: str = "") -> OpenedWorld:
    from hpctrain.comm.backends.horovod_world import HorovodWorld

    world = HorovodWorld.open(algorithm=algorithm)
    return OpenedWorld(world=world, reason=reason, horovod=world.build)


def _open_best(identity: RankIdentity, algorithm: str | None, device: str) -> OpenedWorld:
    if not _has_mpi4py():
        failed = why_no_horovod()
        if failed is None:
            return _open_horovod_alone(algorithm, reason="mpi4py is not installed")
        raise LaunchError(
            f"{identity.launcher} started {identity.num_ranks} ranks, but neither Horovod nor mpi4py can be "
            f"loaded on rank {identity.rank} ({socket.gethostname()}): {INSTALL}. {failed}"
        )
    gpus = device != "cpu" and torch.cuda.is_available()
    failed = why_no_horovod() if gpus or algorithm in NCCL_VARIABLES else None
    if gpus and failed is None:
        failed = _why_not_on_gpus()
    mpi = _open_mpi(identity)
    found = all_gather_json(mpi, [gpus, failed])
    if algorithm not in NCCL_VARIABLES and not all(on_gpu for on_gpu, _ in found):
        return OpenedWorld(world=mpi, reason="the fastest on CPUs")
    without = [rank for rank, (_, text) in enumerate(found) if text is not None]
    if not without:
        asked = (
            f"{algorithm} was asked for"
            if algorithm in NCCL_VARIABLES
            else "NCCL sums directly in GPU memory"
        )
        return _over_mpi(mpi, algorithm, reason=asked)
    where = "" if len(without) == mpi.num_ranks else f" on {describe_ranks(without)}"
    return OpenedWorld(
        world=mpi,
        reason="Horovod cannot be used",
        notes=(f"backend mpi instead of horovod{where}: {found[without[0]][1]}",),
    )


def _why_not_on_gpus() -> str | None:
    """Returns the reason why the installed Horovod has no advantage over MPI on GPUs; None if it has an advantage.

    Horovod must be loadable. Not collective.
    """
    from hpctrain.comm.backends.running_horovod import load_horovod

    hvd = load_horovod()
    if not hvd.nccl_built():
        return "Horovod was built without NCCL (set HOROVOD_GPU_OPERATIONS=NCCL when you build it)"
    return (
        None
        if hvd.mpi_built()
        else "Horovod was built without MPI (set HOROVOD_WITH_MPI=1 when you build it)"
    )


def _has_mpi4py() -> bool:
    return importlib.util.find_spec("mpi4py") is not None
