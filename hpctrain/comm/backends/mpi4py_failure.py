"""Why mpi4py cannot be loaded, and what to do. Pure but for looking for its files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_NAMES = {"mpich": "MPICH and Intel MPI", "openmpi": "Open MPI", "mpiabi": "the MPI ABI"}


def explain_failure(error: Exception) -> tuple[str, str]:
    """Returns what was found and the remedy, each one line without a full stop.

    error: of importing `mpi4py.MPI`. mpi4py has one such module, or, as published, one for each family of MPI.
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
        "libmpi_abi.so and others of the MPI ABI need an mpi4py built for them: name the MPI's own library instead "
        "(libmpi.so.12 of MPICH and Intel MPI, libmpi.so.40 of Open MPI) in MPI4PY_LIBMPI, or leave that unset",
    )
