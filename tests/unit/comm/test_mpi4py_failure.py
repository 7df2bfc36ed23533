"""Why mpi4py cannot be loaded: it is not missing where the MPI library is not one of those that it is built for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.comm.backends.library_probe import explain_failure


def published_mpi4py() -> bool:
    spec = importlib.util.find_spec("mpi4py")
    assert spec is not None
    assert spec.origin is not None
    return bool(list(Path(spec.origin).parent.glob("MPI.*.*.so")))


@pytest.mark.skipif(not published_mpi4py(), reason="mpi4py was built for one MPI")
def test_an_mpi_library_that_mpi4py_is_not_built_for() -> None:
    # What a library of the MPI ABI (libmpi_abi.so) makes mpi4py look for.
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.comm.backends.library_probe"],
        env={**os.environ, "MPI4PY_MPIABI": "mpiabi"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    facts = json.loads(done.stdout.partition("facts ")[2])
    assert facts["error"] == (
        "mpi4py is installed for MPICH and Intel MPI, Open MPI, not for the MPI library that it found "
        "(MPI4PY_MPIABI=mpiabi)"
    )
    assert "libmpi.so.12 of MPICH" in facts["remedy"]
    assert "make setup" not in facts["remedy"]


def test_an_mpi_library_that_is_not_found() -> None:
    found, remedy = explain_failure(RuntimeError("cannot load MPI library\nlibmpi.so: cannot open"))
    assert found == "mpi4py cannot be loaded: cannot load MPI library"
    assert remedy.startswith("load the MPI module")
