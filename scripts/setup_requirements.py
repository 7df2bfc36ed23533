"""Part of setup.sh, run by the environment's Python: writes pip's requirements, and reports what was installed."""

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
    """Returns package name -> lowest version that setup.py accepts."""
    pairs = re.findall(r"""["']([A-Za-z0-9._-]+)>=([0-9.]+)""", (ROOT / "setup.py").read_text())
    return {name_of(name): version for name, version in pairs}


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def built_here() -> dict[str, str]:
    """Returns package name -> version of what setup.sh builds or installs by itself."""
    found = re.findall(r"^([A-Z0-9]+)_VERSION=(\S+)$", (ROOT / "scripts/setup.sh").read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in found}


def pins(requirements: list[str], *, minor: int = sys.version_info[1]) -> dict[str, str]:
    """Returns name -> version of the `name==version` lines that apply to Python 3.`minor`."""
    found = {}
    for line in requirements:
        requirement, _, marker = line.partition(";")
        bound = re.search(r"""python_version *(<|>=) *["']3\.(\d+)""", marker)
        if not bound or (minor < int(bound[2])) == (bound[1] == "<"):
            found[name_of(requirement)] = requirement.strip().split("==")[1]
    return found


def limit(name: str, *, installed: str, pin: str) -> str:
    """Returns a constraint that keeps the installed version, or allows our pin if another package needs a newer one."""
    # These are never replaced: torch was built for this machine, and other packages for this numpy and MPI.
    if name in UNTOUCHED:
        return f"{name}=={installed}"
    if number(installed) > number(pin):
        return f"{name}>={installed}"
    return f"{name}>={installed},<={pin}"


def requirements(*, tests: bool) -> list[str]:
    """Returns the lines of what hpctrain runs with and, with `tests`, of what its tests and documentation need."""
    return [
        line for name in ("runtime.txt", *(("test.txt", "site.txt") if tests else ())) for line in lines(name)
    ]


def write(into: Path, *, keep_installed: bool, tests: bool, torch: str) -> None:
    """Writes requirements.txt and constraints.txt into `into`.

    keep_installed: whether installed packages are kept if hpctrain accepts their version.
    tests: whether also what tests and documentation need.
    torch: its version, if not the pinned one.
    """
    # Horovod and h5py need cmake, cython and pkgconfig only where they are really built.
    wanted = [*requirements(tests=tests), *(r for r in lines("build.txt") if "setuptools" in r)]
    if torch:
        wanted = [f"torch=={torch}" if name_of(line) == "torch" else line for line in wanted]
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
    """Returns the paths of the MPI libraries that this process has loaded."""
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {
        path.strip()
        for path in paths
        if re.search(r"/libmpi(ch)?(_cray|_gnu|_intel)?(_\d+)?\.so[.\d]*$", path.strip())
    }


def report() -> None:
    """Prints what is installed. Imports every package once, so that a missing one is found now. Exits with an error if
    they are built against different MPI libraries."""
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
    # Two MPI libraries in a process define the same symbols, which ends in a segmentation fault.
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
    parser.add_argument("--without-tests", action="store_true")
    parser.add_argument("--torch", default="", metavar="VERSION")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.report:
        report()
    elif arguments.into is not None:
        write(
            arguments.into,
            keep_installed=arguments.keep_installed,
            tests=not arguments.without_tests,
            torch=arguments.torch,
        )
    else:
        sys.exit("setup: --into or --report")


if __name__ == "__main__":
    main()
