#!/usr/bin/env python3
"""Packs everything that `make check-gpu` needs on a machine with a GPU and torch but no network, package manager or
MPI.

    python scripts/pack_gpu_check.py --python-version 3.12      # build/gpu-check.tar.gz
    tar xzf gpu-check.tar.gz && gpu-check/check-gpu             # on the machine with the GPU

The archive holds the Open MPI that is installed here with the libraries it needs, wheels of hpctrain's dependencies for
the Python of that machine, and the working tree. torch and numpy are that machine's own. The machine needs Linux on the
same kind of processor, a C library at least as new as this one's, bash, tar and Python with torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packing import PIP, REPOSITORY, PackError, Target, copy_tree, output

NAME = "gpu-check"
LARGEST_BYTES = 60_000_000

# Packages of requirements/ that the checks, which are tests, import, with their dependencies. torch and numpy are not
# packed: the machine has those that fit its GPU.
WHEELS = (
    "annotated-doc", "annotated-types", "click", "h5py", "iniconfig", "jinja2", "lazy-loader", "markdown-it-py",
    "markupsafe", "mdurl", "mpi4py", "packaging", "pluggy", "psutil", "pydantic", "pydantic-core", "pygments", "pytest",
    "pytest-timeout", "rich", "shellingham", "typer", "typing-inspection", "typing-extensions", "xxhash",
)  # fmt: skip
OLD_PYTHON_WHEELS = ("exceptiongroup", "tomli")  # before 3.11

PROGRAMS = ("mpirun", "orted")
# Libraries that belong to the C library, or that every Python with torch has.
LEFT_OUT = re.compile(
    r"(ld-linux|linux-vdso|libc|libm|libdl|libpthread|librt|libutil|libgcc_s|libstdc\+\+)[-.]"
)
# Components for network hardware: they need 30 MB of libraries and are not used on a single machine.
NETWORKS = re.compile(r"lib(ucp|uct|ucs|ucm|fabric|psm2|psm_infinipath|ibverbs|rdmacm|efa|nl-3|oshmem)\.")
# Libraries that most machines have, perhaps in a newer version: the packed one is used only if the machine's is
# missing.
SPARE = re.compile(r"lib(z|udev|cap|numa|atomic)\.")
# Names as ompi_info prints them.
DIRECTORIES = {
    "Bindir": "bin",
    "Libdir": "lib",
    "Pkglibdir": "lib/openmpi",
    "Sysconfdir": "etc",
    "Pkgdatadir": "share",
}


def main() -> int:
    arguments = _parser().parse_args()
    made: Path = arguments.output
    target = Target(python=arguments.python_version)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
            root = Path(name) / NAME
            root.mkdir()
            copy_tree(root / "tree")
            copy_compiled(root / "tree")
            pack_open_mpi(root / "openmpi")
            pack_wheels(root / "wheels", target=target, download=not arguments.no_wheels)
            shutil.copy(REPOSITORY / "scripts" / "check_gpu.sh", root / "check-gpu")
            made.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(made, "w:gz", compresslevel=9) as archive:
                archive.add(root, arcname=NAME)
    except PackError as error:
        print(f"pack_gpu_check: {error}", file=sys.stderr)
        return 1
    num_bytes = made.stat().st_size
    if num_bytes > LARGEST_BYTES:
        print(
            f"pack_gpu_check: {made} has {num_bytes / 1e6:.1f} MB, more than {LARGEST_BYTES / 1e6:g}",
            file=sys.stderr,
        )
        return 1
    print(f"{made}: {num_bytes / 1e6:.1f} MB, for {target}")
    print(f"there: tar xzf {made.name} && {NAME}/check-gpu")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    running = "{}.{}".format(*sys.version_info)
    parser.add_argument(
        "--python-version",
        default=running,
        metavar="3.N",
        help=f"Python version of the machine with the GPU; default: {running}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "build" / f"{NAME}.tar.gz",
        metavar="PATH",
        help="the archive",
    )
    parser.add_argument(
        "--no-wheels", action="store_true", help="the machine has hpctrain's dependencies already"
    )
    return parser


def copy_compiled(tree: Path) -> None:
    """Copies the sums in shared memory as compiled for this Python: the machine may have no compiler."""
    sums = Path("hpctrain", "reduce", "shared_memory")
    for compiled in (REPOSITORY / sums).glob("_add.*.so"):
        shutil.copy(compiled, tree / sums)


# ---------------------------------------------------------------------- Open MPI


def pack_open_mpi(target: Path) -> None:
    """Copies the Open MPI found through PATH as a relocatable tree; `check_gpu.sh` sets the variables that it needs."""
    where = open_mpi_directories()
    for kind in DIRECTORIES.values():
        (target / kind).mkdir(parents=True, exist_ok=True)
    library = next((path for path in _libmpi(where)), None)
    if library is None:
        raise PackError(
            f"no libmpi.so.40 in {where['Libdir']} or its parent: hpctrain's archive needs Open MPI 4"
        )
    programs = [Path(where["Bindir"]) / program for program in PROGRAMS]
    for missing in (path for path in programs if not path.exists()):
        raise PackError(f"{missing} is missing: install all of Open MPI (Debian: openmpi-bin)")
    components = sorted(Path(where["Pkglibdir"]).glob("mca_*.so"))
    needed = libraries_of([library, *programs, *components])
    libraries = {library}
    for path in (library, *programs, *components):
        if any(NETWORKS.match(other.name) for other in needed[path]):
            if path in components:
                continue
            raise PackError(f"{path} needs libraries of network hardware, which are not packed")
        libraries |= needed[path]
        if path is not library:
            kind = "bin" if path in programs else DIRECTORIES["Pkglibdir"]
            shutil.copy(path.resolve(), target / kind / path.name)
    (target / "spare").mkdir()
    for path in sorted(libraries):
        shutil.copy(path.resolve(), target / ("spare" if SPARE.match(path.name) else "lib") / path.name)
    for kind in ("Sysconfdir", "Pkgdatadir"):
        for path in Path(where[kind]).glob("*"):
            if path.is_file() and path.suffix in (".txt", ".conf"):
                shutil.copy(path, target / DIRECTORIES[kind])


def open_mpi_directories() -> dict[str, str]:
    """Returns the directories of the installed Open MPI: name as ompi_info prints it -> path."""
    if shutil.which("ompi_info") is None:
        raise PackError("no Open MPI on the PATH (ompi_info): install it, as `make setup` does")
    lines = output("ompi_info", "--path", "all").splitlines()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    missing = [name for name in DIRECTORIES if name not in found]
    if missing:
        raise PackError(
            f"ompi_info --path all does not say where {', '.join(missing)} is: Open MPI 4 is needed"
        )
    return found


def _libmpi(where: dict[str, str]) -> Iterable[Path]:
    for directory in (Path(where["Libdir"]), *Path(where["Libdir"]).parents[:2]):
        if (directory / "libmpi.so.40").exists():
            yield directory / "libmpi.so.40"


def libraries_of(paths: Sequence[Path]) -> dict[Path, set[Path]]:
    """Returns for each file the shared libraries that it loads, as paths with the requested names, without those of the
    C library."""
    found: dict[Path, set[Path]] = {path: set() for path in paths}
    for line in output("ldd", *map(str, paths)).splitlines():
        if not line.startswith("\t"):
            path = Path(line.removesuffix(":"))
            continue
        name, arrow, rest = line.strip().partition(" => ")
        if not arrow or LEFT_OUT.match(name):
            continue
        place = rest.split(" (")[0]
        if place == "not found":
            raise PackError(f"{path} needs {name}, which is not installed here")
        found[path].add(Path(place).parent / name)
    return found


# ---------------------------------------------------------------------- wheels


def pack_wheels(directory: Path, *, target: Target, download: bool) -> None:
    """Downloads the wheels for that Python. If that fails, the archive has none, and the machine must have the
    packages; prints so."""
    directory.mkdir()
    if not download:
        return
    names = WHEELS + (OLD_PYTHON_WHEELS if target.minor < 11 else ())
    versions = target.pinned()
    command = [*PIP, "download", "--quiet", "--no-deps", *target.pip_options, f"--dest={directory}"]
    # Of h5py, which `make setup` builds, the published wheel of the same release.
    asked = [*command, "--retries=1", "--timeout=15", *(f"{name}=={versions[name]}" for name in names)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return
    for wheel in directory.iterdir():
        wheel.unlink()
    reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    print(
        f"no wheels in the archive ({reason}): the machine with the GPU must have {', '.join(names)}; or pack where "
        "pip finds them",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
