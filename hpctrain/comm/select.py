"""Open the backend a run asks for, or the best that is there."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import dataclass

from hpctrain.comm.agreement import all_gather_json, describe_ranks
from hpctrain.comm.communicator import World
from hpctrain.comm.horovod_settings import HorovodBuild
from hpctrain.comm.serial import SerialWorld
from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import RankIdentity, cross_check, identify

BACKENDS = ("auto", "horovod", "mpi", "serial")
INSTALL = "install one of them in the environment that every rank uses (make setup builds both)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorld:
    """A world, and what it was fallen back from and why: lines for the user.

    horovod: what the Horovod that runs can do; None over another backend.
    """

    world: World
    notes: tuple[str, ...] = ()
    horovod: HorovodBuild | None = None


def open_world(
    backend: str = "auto", *, identity: RankIdentity | None = None, algorithm: str | None = None
) -> OpenedWorld:
    """Join the other ranks over `backend`. Collective over all ranks that the launcher started.

    auto: serial for one rank; for more Horovod where every rank can load it, else MPI.
    identity: who this process is; read from the environment when not given.
    algorithm: of the recipe; Horovod's own are chosen when it starts (see `horovod_settings.why_no_nccl`).
    Raises UsageError for an unknown backend; LaunchError when the backend cannot be loaded or does not fit
    the number of ranks; TopologyError when it counts the ranks differently from the launcher.
    """
    if identity is None:
        identity = identify(os.environ, socket.gethostname())
    if backend not in BACKENDS:
        hint = "; threads are for tests: hpctrain.comm.threads.run_threads" if backend == "threads" else ""
        raise UsageError(f"no communication backend {backend!r}: choose {', '.join(BACKENDS)}{hint}")
    if backend == "serial" and identity.num_ranks > 1:
        raise LaunchError(
            f"the backend serial is for one rank, {identity.launcher} started {identity.num_ranks}: "
            "choose auto, horovod or mpi, or start one rank"
        )
    if backend == "serial" or (backend == "auto" and identity.num_ranks == 1):
        return OpenedWorld(world=SerialWorld())
    if backend == "horovod":
        opened = _open_horovod(algorithm)
    elif backend == "mpi":
        opened = OpenedWorld(world=_open_mpi())
    else:
        opened = _open_best(identity, algorithm)
    cross_check(identity, mpi_rank=opened.world.rank, mpi_size=opened.world.num_ranks)
    return opened


def _open_horovod(algorithm: str | None) -> OpenedWorld:
    from hpctrain.comm.horovod import HorovodWorld

    world = HorovodWorld.open(algorithm=algorithm)
    return OpenedWorld(world=world, horovod=world.build)


def _open_mpi() -> World:
    from hpctrain.comm.mpi import MpiWorld

    return MpiWorld.open()


def why_no_horovod() -> str | None:
    """Why this process cannot load Horovod, or None if it can. Loads it, but does not start it."""
    from hpctrain.comm.horovod import load_horovod

    try:
        load_horovod()
    except LaunchError as error:
        return str(error)
    return None


def _open_best(identity: RankIdentity, algorithm: str | None) -> OpenedWorld:
    reason = why_no_horovod()
    if importlib.util.find_spec("mpi4py") is None:
        if reason is None:
            return _open_horovod(algorithm)
        raise LaunchError(
            f"{identity.launcher} started {identity.num_ranks} ranks, but neither Horovod nor mpi4py can be "
            f"loaded on rank {identity.rank} ({socket.gethostname()}): {INSTALL}. {reason}"
        )
    # MPI first: through it the ranks can agree. A rank that started Horovod alone would wait for ever.
    mpi = _open_mpi()
    cross_check(identity, mpi_rank=mpi.rank, mpi_size=mpi.num_ranks)
    reasons = all_gather_json(mpi, reason)
    without = [rank for rank, text in enumerate(reasons) if text is not None]
    if not without:
        mpi.close()
        return _open_horovod(algorithm)
    where = "" if len(without) == mpi.num_ranks else f" on {describe_ranks(without)}"
    return OpenedWorld(world=mpi, notes=(f"backend mpi instead of horovod{where}: {reasons[without[0]]}",))
