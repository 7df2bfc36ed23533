"""Facts about the installed communication libraries, for `hpctrain doctor`. No library is started.

The libraries are imported through importlib, so that a missing library is reported and raises no error. MPI is the
exception: loading `mpi4py.MPI` may start MPI, and a failed start ends the process. MPI is therefore probed after a
world was opened, or in a separate process (`python -m hpctrain.comm.backends.library_probe`).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_NAMES = {"mpich": "MPICH and Intel MPI", "openmpi": "Open MPI", "mpiabi": "the MPI ABI"}


def explain_failure(error: Exception) -> tuple[str, str]:
    """Returns two texts, each one line without a full stop: why mpi4py cannot be loaded, and the remedy.

    error: the exception from importing `mpi4py.MPI`. The published mpi4py has one such module for each family of MPI
    libraries; an mpi4py that was built from source has only one.
    """
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    found = f"mpi4py cannot be loaded: {first_line}"
    spec = importlib.util.find_spec("mpi4py")
    if spec is None or spec.origin is None:
        return found, "make setup installs mpi4py"
    families = sorted(path.name.split(".")[1] for path in Path(spec.origin).parent.glob("MPI.*.*.so"))
    if not isinstance(error, ImportError) or error.name not in ("mpi4py", "mpi4py.MPI") or not families:
        return (
            found,
            "load the MPI module that mpi4py was built with; or build it with this MPI's compiler: MPICC=mpicc make "
            "setup",
        )
    has = ", ".join(_NAMES.get(family, family) for family in families)
    chosen = next((name for name in ("MPI4PY_MPIABI", "MPI4PY_LIBMPI") if os.environ.get(name)), None)
    by = "" if chosen is None else f" ({chosen}={os.environ[chosen]})"
    return (
        f"mpi4py is installed for {has}, not for the MPI library that it found{by}",
        "libmpi_abi.so and other libraries with the MPI ABI need an mpi4py that is built for that ABI: set "
        "MPI4PY_LIBMPI to the native library of the MPI (libmpi.so.12 of MPICH and Intel MPI, libmpi.so.40 of Open "
        "MPI), or unset it",
    )


# Facts about the installed communication libraries, for `hpctrain doctor`.


_MARK = "hpctrain-mpi-facts "
_LEVELS = ("single", "funneled", "serialized", "multiple")
_FORK_STATES = ("disabled", "enabled", "unneeded")  # enum ibv_fork_status
_HOROVOD_PARTS = ("mpi", "gloo", "nccl", "cuda", "rocm")


def probe_horovod() -> dict[str, Any]:
    """Returns a dict with Horovod's `version` and `built` (names of the parts that it was built with, such as nccl).

    The dict contains only `error` if Horovod cannot be loaded.
    """
    try:
        version = importlib.metadata.version("horovod")
        horovod = importlib.import_module("horovod.torch")
    except importlib.metadata.PackageNotFoundError:
        return {"error": "not installed"}
    except Exception as error:
        # A build against another torch fails to load in many ways; each is a finding, not a crash.
        return {"error": f"cannot be loaded: {_first_line(error)}"}
    built = [part for part in _HOROVOD_PARTS if bool(getattr(horovod, f"{part}_built")())]
    return {"version": version, "built": built}


def probe_mpi4py() -> dict[str, Any]:
    """Returns a dict with the `version` of mpi4py from its metadata, or with `error`.

    MPI is neither loaded nor started.
    """
    try:
        return {"version": importlib.metadata.version("mpi4py")}
    except importlib.metadata.PackageNotFoundError:
        return {"error": "mpi4py is not installed"}


def probe_started_mpi() -> dict[str, Any]:
    """Returns a dict of facts about MPI, without starting MPI.

    The keys are `library` and `standard`, or `error` and `remedy` if mpi4py cannot be loaded. If MPI is running, the
    keys `thread_level`, `num_ranks`, `transports` and `rdma_fork` are added.
    """
    try:
        mpi4py: Any = importlib.import_module("mpi4py")
        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # Horovod may have started it; it is only queried here
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except Exception as error:
        return dict(zip(("error", "remedy"), explain_failure(error), strict=True))
    facts = {
        "library": mpi.Get_library_version().strip("\x00 \n").split("\n")[0].split(", package")[0],
        "standard": ".".join(map(str, mpi.Get_version())),
    }
    if mpi.Is_initialized() and not mpi.Is_finalized():
        facts["thread_level"] = _LEVELS[int(mpi.Query_thread())]
        facts["num_ranks"] = mpi.COMM_WORLD.Get_size()
        facts["transports"] = transports_in(_own_maps())
        facts["rdma_fork"] = _rdma_fork(facts["transports"])
    return facts


def transports_in(maps: str) -> list[str]:
    """Returns the MPI transports among the libraries that /proc/PID/maps lists. Pure.

    Open MPI unloads transports that it does not use. The list is empty if MPI has its transports built in.
    """
    return sorted(
        set(re.findall(r"/(mca_(?:pml|btl|mtl)_\w+|libucp|libfabric|libpsm2|libibverbs)\.so", maps))
    )


def _own_maps() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def _rdma_fork(transports: list[str]) -> str | None:
    """Returns what libibverbs (the library of InfiniBand) reports about forking with registered memory.

    Returns None if libibverbs is not among the loaded `transports`, or is too old to report this.
    """
    if "libibverbs" not in transports:
        return None
    try:
        return _FORK_STATES[ctypes.CDLL("libibverbs.so.1").ibv_is_fork_initialized()]
    except (OSError, AttributeError, IndexError):
        return None  # older than rdma-core 35


def probe_mpi_alone(*, timeout_s: float = 60.0) -> dict[str, Any]:
    """Starts MPI as one rank in a separate process, and returns the facts of `probe_started_mpi` from that process.

    If MPI cannot start there, MPI ends that process, and `error` holds the process's output.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain.comm.backends.library_probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"MPI did not start within {timeout_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            facts: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return facts
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip(" -*\t")]
    return {"error": f"MPI cannot start (exit code {done.returncode}): {' '.join(lines)[:300]}"}


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def main() -> None:
    """Starts MPI as one rank and prints the facts of `probe_started_mpi` as JSON."""
    try:
        mpi4py: Any = importlib.import_module("mpi4py")
        mpi4py.rc.thread_level = "multiple"
        importlib.import_module("mpi4py.MPI")
        facts = probe_started_mpi()
    except Exception as error:
        facts = dict(zip(("error", "remedy"), explain_failure(error), strict=True))
    print(_MARK + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
