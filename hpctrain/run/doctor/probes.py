"""Probes of `hpctrain doctor`: facts about this rank, as JSON values. Nothing here communicates or starts MPI."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.comm import probe_horovod, probe_mpi4py
from hpctrain.errors import LaunchError
from hpctrain.launch import RankIdentity, find_library, identify, in_effect
from hpctrain.storage import filesystem_of
from hpctrain.version import __version__


def inspect_rank(*, run_directory: Path, environ: Mapping[str, str], hostname: str) -> dict[str, Any]:
    """Returns the facts of this rank by topic. A component that is missing or broken has the key `error`."""
    return {
        "host": hostname,
        "python": _python(),
        "torch": _torch(),
        "sums": _sums(),
        "launcher": _launcher(environ, hostname),
        "cores": _cores(environ),
        "yielding": {"library": find_library(), "in_effect": in_effect()},
        "mpi": probe_mpi4py(),
        "horovod": probe_horovod(),
        "hdf5": _hdf5(),
        "run_directory": _run_directory(run_directory),
        "scratch": _scratch(),
        "tcp": _tcp(),
    }


def identity_of(facts: Mapping[str, Any]) -> RankIdentity | None:
    """Converts the launcher's facts back to a RankIdentity; None if the launcher's variables are contradictory."""
    launcher = facts["launcher"]
    return None if "error" in launcher else RankIdentity(**launcher)


def _python() -> dict[str, Any]:
    return {"version": platform.python_version(), "executable": sys.executable, "hpctrain": __version__}


def _torch() -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return {"error": f"cannot be loaded: {error}".splitlines()[0]}
    count = torch.cuda.device_count()
    nccl = None
    if count:
        try:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        except (AttributeError, RuntimeError):
            nccl = None  # a build without NCCL
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "nccl": nccl,
        "threads": torch.get_num_threads(),
    }


def _sums() -> dict[str, Any]:
    try:
        return {
            "compiled": importlib.import_module("hpctrain.reduce.shared_memory.summation").COMPILED
            is not None
        }
    except Exception as error:  # without torch there is nothing to sum
        return {"error": f"cannot be loaded: {error}".splitlines()[0]}


def _launcher(environ: Mapping[str, str], hostname: str) -> dict[str, Any]:
    try:
        return asdict(identify(environ, hostname))
    except LaunchError as error:
        return {"error": str(error)}


def _cores(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        "usable": sorted(os.sched_getaffinity(0)),
        "of_machine": os.cpu_count(),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
    }


def _hdf5() -> dict[str, Any]:
    try:
        h5py = importlib.import_module("h5py")
    except Exception as error:
        return {"error": f"cannot be loaded: {error}".splitlines()[0]}
    return {
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
        "parallel": bool(h5py.get_config().mpi),
    }


def _run_directory(directory: Path) -> dict[str, Any]:
    """`kind` and `free_bytes` of the filesystem where `directory` is or would be made; `error` if it is unwritable."""
    facts: dict[str, Any] = {"path": str(directory)}
    try:
        place = directory.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            return {**facts, "error": f"{place} is a file, not a directory"}
        # access() is not reliable on network filesystems: make a file.
        with tempfile.NamedTemporaryFile(dir=place, prefix=".hpctrain-doctor-"):
            pass
        return {**facts, "kind": filesystem_of(place).kind, "free_bytes": shutil.disk_usage(place).free}
    except OSError as error:
        return {**facts, "error": f"cannot be written ({error.strerror})"}


def _scratch() -> dict[str, Any]:
    shm = Path("/dev/shm")
    return {
        "tmp_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "shm_free_bytes": shutil.disk_usage(shm).free if shm.is_dir() else None,
    }


def _tcp() -> dict[str, Any]:
    try:
        name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return {"error": "not reported by the system"}
    return {"congestion_control": name}
