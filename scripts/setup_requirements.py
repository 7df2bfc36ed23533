"""Part of setup.sh: which requirements pip is given, and what came out of it. Run by the environment's Python."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNTOUCHED = ("torch", "numpy", "mpi4py")


def lines(name: str) -> list[str]:
    text = (ROOT / "requirements" / name).read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise SystemExit(f"setup: no package name in the requirement {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def least_versions() -> dict[str, str]:
    """What setup.py says that hpctrain needs at least."""
    pairs = re.findall(r"""["']([A-Za-z0-9._-]+)>=([0-9.]+)""", (ROOT / "setup.py").read_text())
    return {name_of(name): version for name, version in pairs}


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def pins(requirements: list[str]) -> dict[str, str]:
    """The version of each `name==version` that holds for this Python."""
    found = {}
    for line in requirements:
        requirement, _, marker = line.partition(";")
        bound = re.search(r"""python_version *(<|>=) *["']3\.(\d+)""", marker)
        if not bound or (sys.version_info[1] < int(bound[2])) == (bound[1] == "<"):
            found[name_of(requirement)] = requirement.strip().split("==")[1]
    return found


def limit(name: str, *, installed: str, pin: str) -> str:
    """A constraint that lets the installed version stay, and takes our pin where another package needs newer."""
    # Never touched: torch was built for this machine, and other packages here against this numpy and MPI.
    if name in UNTOUCHED:
        return f"{name}=={installed}"
    if number(installed) > number(pin):
        return f"{name}>={installed}"
    return f"{name}>={installed},<={pin}"


def write(into: Path, *, keep_installed: bool) -> None:
    """Write requirements.txt and constraints.txt into `into`.

    keep_installed: what the environment has stays, in a version that hpctrain takes.
    """
    # Horovod and h5py need cmake, cython and pkgconfig only where they are really built.
    wanted = [
        *lines("runtime.txt"),
        *lines("test.txt"),
        *lines("site.txt"),
        *(r for r in lines("build.txt") if "setuptools" in r),
    ]
    constraints = lines("constraints.txt")
    if keep_installed:
        have = {name_of(found.metadata["Name"]): found.version for found in distributions()}
        least = least_versions()
        kept = {name for name, version in have.items() if number(version) >= number(least.get(name, "0"))}
        pinned = pins([*wanted, *constraints])
        wanted = [requirement for requirement in wanted if name_of(requirement) not in kept]
        constraints = [line for line in constraints if name_of(line) not in have]
        constraints += [limit(n, installed=have[n], pin=pinned[n]) for n in sorted(pinned) if n in kept]
        for name in UNTOUCHED:
            if name in kept:
                print(f"    keeping {name} {have[name]}")
    (into / "requirements.txt").write_text("\n".join(wanted) + "\n")
    (into / "constraints.txt").write_text("\n".join(constraints) + "\n")


def loaded_mpi() -> set[str]:
    """The MPI libraries that this process holds."""
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {
        path.strip()
        for path in paths
        if re.search(r"/libmpi(ch)?(_cray|_gnu|_intel)?(_\d+)?\.so[.\d]*$", path.strip())
    }


def report() -> None:
    """Print what is installed. Imports everything once, so that what is missing is met now."""
    # MPI_Init outside a job aborts on some sites' login nodes; h5py's parallel build imports mpi4py.
    try:
        import mpi4py

        mpi4py.rc.initialize = False
    except ImportError:
        pass
    import h5py
    import torch

    import hpctrain.cli.main  # noqa: F401

    horovod = "no Horovod: hpctrain uses its mpi backend"
    with contextlib.suppress(ImportError, RuntimeError):
        from mpi4py import MPI  # noqa: F401
    try:
        import horovod.torch as hvd

        horovod = f"Horovod ({'MPI' if hvd.mpi_built() else 'no MPI'}{', NCCL' if hvd.nccl_built() else ''})"
    except ImportError:
        pass
    parallel = "parallel" if h5py.get_config().mpi else "not parallel"
    print(f"    torch {torch.__version__}, h5py {h5py.__version__} ({parallel}), {horovod}")
    # Two of them share their symbols' names, and end in a segmentation fault of the first rank.
    if len(found := loaded_mpi()) > 1:
        sys.exit(
            f"setup: mpi4py, h5py and Horovod were built against different MPIs: {', '.join(sorted(found))}. "
            "Set MPICC to the wrapper of one of them and HDF5_DIR to an HDF5 built with it, and remove what "
            "this environment has of the other."
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep-installed", action="store_true")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.report:
        report()
    elif arguments.into is not None:
        write(arguments.into, keep_installed=arguments.keep_installed)
    else:
        sys.exit("setup: --into or --report")


if __name__ == "__main__":
    main()
