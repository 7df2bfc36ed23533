"""Record of a run's environment, sufficient to explain its speed and to repeat it. Contains no secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import h5py
import psutil
import torch

from hpctrain.comm import all_gather_json
from hpctrain.run.session import Session
from hpctrain.version import __version__

PACKAGES = ("torch", "numpy", "h5py", "mpi4py", "horovod")

# Listed one by one: a prefix such as HOROVOD_ would also match secret keys, which must not be recorded.
VARIABLES = (
    "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", "LD_PRELOAD", "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD",
    "HPCTRAIN_RANKS_PER_NODE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def environment_record(session: Session, *, commit: str | None) -> dict[str, Any]:
    """Returns the environment of all ranks. Collective; the same value on every rank."""
    mine = {
        "rank": session.rank,
        "host": platform.node(),
        "node": session.identity.node_name,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": str(session.device),
        "pid": os.getpid(),
    }
    return {
        **versions_record(),
        "commit": commit,
        "launcher": session.identity.launcher,
        "backend": session.world.reduction_backend,
        "backend_reason": session.backend_reason,
        "topology": session.topology.describe(),
        "ranks_by_node": [list(ranks) for ranks in session.topology.ranks_by_node],
        "node_names": list(session.topology.node_names),
        "notes": session.notes,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "ranks": all_gather_json(session.world, mine),
    }


def versions_record() -> dict[str, Any]:
    """Returns the versions of Python, packages and libraries in this process. Not collective."""
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hdf5": h5py.version.hdf5_version,
        "hdf5_parallel": bool(h5py.get_config().mpi),
        "cuda": torch.version.cuda,
    }


def machine_record() -> dict[str, Any]:
    """Returns the properties of this machine that a measurement depends on. Not collective."""
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _cpu_model() -> str:
    """CPU model name from the kernel; the architecture if the kernel has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def working_commit() -> str | None:
    """Returns the commit of the working directory, with `+changes` if files differ from it; None outside git."""
    try:
        asked = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
        done = subprocess.run(asked, cwd=Path.cwd(), capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
