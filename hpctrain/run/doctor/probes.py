"""Gathers the facts about this rank for `hpctrain doctor`, as JSON values. Neither communicates nor starts MPI."""

from __future__ import annotations

import importlib
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
from hpctrain.launch import (
    RankIdentity,
    find_yield_library,
    identify,
    in_effect,
    read_surroundings,
    why_not_alone,
)
from hpctrain.run.doctor.environment import probe_cores, read_environment, read_start
from hpctrain.run.doctor.network import read_limits, read_network
from hpctrain.run.doctor.run_directory import read_run_directory
from hpctrain.version import __version__


def inspect_rank(
    *,
    run_directory: Path,
    environ: Mapping[str, str],
    hostname: str,
    num_checkpoints: int = 3,
    checkpoint_bytes: int | None = None,
) -> dict[str, Any]:
    """Returns the facts about this rank by topic. The facts about a missing or broken component have the key `error`.

    Call this function as soon as the imports are done, since the imports are timed.

    num_checkpoints: the number of checkpoints that are kept.
    checkpoint_bytes: the size of one checkpoint; None: the size of the newest checkpoint in the run directory.
    """
    start = read_start()
    return {
        "host": hostname,
        "python": _python(),
        "torch": _torch(),
        "sums": _sums(),
        "launcher": _launcher(environ, hostname),
        "start": start,
        "cores": probe_cores(environ),
        "yielding": {"library": find_yield_library(), "in_effect": in_effect()},
        "mpi": probe_mpi4py(),
        "horovod": probe_horovod(),
        "hdf5": _hdf5(),
        "run_directory": read_run_directory(
            run_directory, num_checkpoints=num_checkpoints, checkpoint_bytes=checkpoint_bytes
        ),
        "scratch": _scratch(),
        "limits": read_limits(),
        "network": read_network(environ),
        "environment": read_environment(environ),
        "tcp": _tcp(),
    }


def identity_from(facts: Mapping[str, Any]) -> RankIdentity | None:
    """Returns the RankIdentity in the launcher's facts; None if the launcher's variables contradict each other."""
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
    surroundings = read_surroundings(environ)
    try:
        identity = identify(environ, hostname)
    except LaunchError as error:
        return {"error": str(error)}
    hidden = why_not_alone(environ, surroundings)
    return asdict(identity) if hidden is None else {"error": hidden}


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
