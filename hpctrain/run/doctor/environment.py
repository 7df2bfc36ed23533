"""What must not differ between ranks without anyone noticing: variables, packages, kernel and processor."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm import describe_ranks
from hpctrain.run.doctor.finding import Facts, Finding, warning
from hpctrain.storage import hash_of

# Of launchers only the variables that users set: others name the rank, and differ by design.
_PREFIXES = (
    "OMP_", "KMP_", "MKL_", "OPENBLAS_", "UCX_", "FI_", "NCCL_", "HOROVOD_", "HDF5_", "HPCTRAIN_", "TORCH_", "PYTORCH_",
    "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_coll", "OMPI_MCA_io", "OMPI_MCA_osc", "OMPI_MCA_mpi_",
    "I_MPI_FABRICS", "I_MPI_OFI_", "I_MPI_PIN", "MPICH_OFI_",
)  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
_SET_BY_LAUNCHERS = ("I_MPI_PIN_INFO", "I_MPI_PIN_MAPPING")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL")
_LONG_CHARS = 120


def read_environment(environ: Mapping[str, str], *, search_path: Iterable[str] = sys.path) -> dict[str, Any]:
    """Returns the variables that change how a rank runs, without secrets, and what the node and its packages are.

    Long values are given by their hash: every rank's facts travel to all.
    """
    variables = {
        name: text
        if len(text) <= _LONG_CHARS
        else f"{len(text)} characters, hash {hash_of(text.encode())[:8]}"
        for name, text in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and not (_SECRET.search(name) or name in _SET_BY_LAUNCHERS)
    }
    packages = sorted(
        {entry for folder in search_path for entry in _entries(folder) if entry.endswith("-info")}
    )
    return {
        "variables": variables,
        "num_packages": len(packages),
        "packages": hash_of("\n".join(packages).encode())[:8],
        "prefix": sys.prefix,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "processor": _processor(),
    }


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:
        return []  # not all entries of the search path exist, and some are archives


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def judge_variables(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns one warning for each variable that is not the same on all ranks. Pure."""
    by_rank = [facts.get("environment", {}).get("variables", {}) for facts in facts_by_rank]
    findings = []
    for name in sorted({name for variables in by_rank for name in variables}):
        ranks: dict[str, list[int]] = {}
        for rank, variables in enumerate(by_rank):
            ranks.setdefault(variables.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            shown = ", ".join(
                f"{value or 'empty'} on {describe_ranks(those)}" for value, those in ranks.items()
            )
            cure = (
                f"set it for all ranks or for none: in the batch script, or by mpirun -x {name} (Open MPI), mpiexec "
                f"-genvlist {name} (MPICH, Intel MPI)"
            )
            findings.append(warning("variables", f"{name} differs between ranks: {shown}", cure))
    return findings
