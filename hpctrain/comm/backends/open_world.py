"""Open the backend a run asks for, or the best that is there."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from hpctrain.comm.backends.horovod_environment import NCCL_VARIABLES, HorovodBuild
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.collectives.agreement import all_gather_json, describe_ranks, raise_together
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import RankIdentity, cross_check, identify
from hpctrain.launch.yielding import YIELD_VARIABLE, in_effect

BACKENDS = ("auto", "horovod", "mpi", "serial")
INSTALL = "install one of them in the environment that every rank uses (make setup builds both)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWorld:
    """A world, why it is this one, and what could not be used, as lines for the user.

    reason: a clause; empty where the backend was asked for. horovod: what it can do; None over another backend.
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
    """Join the other ranks over `backend`. Collective over all ranks that the launcher started.

    auto: serial for one rank; for more MPI, along with Horovod where gradients lie on GPUs that its NCCL sums
    (docs/adr/0023). Where mpi4py is missing, Horovod.
    horovod: for its own reductions; everything else goes over MPI, where Horovod is built with it and mpi4py is there.
    identity: who this process is; read from the environment when not given.
    algorithm: of the recipe; Horovod's own are chosen when it starts (see `horovod_settings.why_no_nccl`).
    device: of the recipe; with `cpu` no GPU is looked for.
    Raises UsageError for an unknown backend; LaunchError when the backend cannot be loaded or does not fit
    the number of ranks; TopologyError when it counts the ranks differently from the launcher.
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
            f"the backend serial is for one rank, {identity.launcher} started {identity.num_ranks}: "
            "choose auto, horovod or mpi, or start one rank"
        )
    if backend == "serial" or (backend == "auto" and identity.num_ranks == 1):
        return OpenedWorld(world=SerialWorld(), reason="one rank")
    if backend == "horovod":
        opened = _open_horovod(identity, algorithm)
    elif backend == "mpi":
        opened = OpenedWorld(world=_open_mpi(identity))
    else:
        opened = _open_best(identity, algorithm, device)
    cross_check(identity, mpi_rank=opened.world.rank, mpi_size=opened.world.num_ranks)
    return opened


def why_no_horovod() -> str | None:
    """Why this process cannot load Horovod, or None if it can. Loads it, but does not start it."""
    from hpctrain.comm.backends.running_horovod import load_horovod

    try:
        load_horovod()
    except LaunchError as error:
        return str(error)
    return None


def yield_while_idle(environ: MutableMapping[str, str], *, identity: RankIdentity, num_cores: int) -> None:
    """Have Open MPI yield while Horovod's thread waits in it, unless the user has said otherwise. Before MPI starts.

    That thread waits on the core that computes: two ranks on two cores train 1.4 to 2.1 times as fast so. Where ranks
    outnumber cores, yielding needs a library that is preloaded (docs/adr/0024).
    """
    if (identity.host_size or 1) <= num_cores or in_effect():
        environ.setdefault(YIELD_VARIABLE, "1")


def _open_mpi(identity: RankIdentity) -> World:
    from hpctrain.comm.backends.mpi_world import MpiWorld

    world = MpiWorld.open()
    # Before the ranks communicate: where each of them is alone in a world of its own, the others would not answer.
    cross_check(identity, mpi_rank=world.rank, mpi_size=world.num_ranks)
    return world


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
    from hpctrain.comm.backends.horovod_over_mpi import HorovodOverMpi
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
            f"{algorithm} was asked for" if algorithm in NCCL_VARIABLES else "NCCL sums in the memory of GPUs"
        )
        return _over_mpi(mpi, algorithm, reason=asked)
    where = "" if len(without) == mpi.num_ranks else f" on {describe_ranks(without)}"
    return OpenedWorld(
        world=mpi,
        reason="Horovod cannot be used",
        notes=(f"backend mpi instead of horovod{where}: {found[without[0]][1]}",),
    )


def _why_not_on_gpus() -> str | None:
    """Why Horovod, which loads, gains nothing on GPUs; None if it does. Not collective."""
    from hpctrain.comm.backends.running_horovod import load_horovod

    hvd = load_horovod()
    if not hvd.nccl_built():
        return "it is built without NCCL (HOROVOD_GPU_OPERATIONS=NCCL when it is built)"
    return None if hvd.mpi_built() else "it is built without MPI (HOROVOD_WITH_MPI=1 when it is built)"


def _has_mpi4py() -> bool:
    return importlib.util.find_spec("mpi4py") is not None
