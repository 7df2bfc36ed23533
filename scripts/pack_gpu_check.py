#!/usr/bin/env python3
"""Pack what `make check-gpu` needs on a machine with a GPU and torch, but no network, package manager or MPI.

    python scripts/pack_gpu_check.py --python-version 3.12      # build/gpu-check.tar.gz
    tar xzf gpu-check.tar.gz && gpu-check/check-gpu             # on the machine with the GPU

The archive holds the Open MPI that is installed here with the libraries it needs, wheels of hpctrain's dependencies for
the Python of that machine, and the working tree. torch and numpy are that machine's own. The machine needs Linux on the
same kind of processor, a C library at least as new as this one's, bash, tar and Python with torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NAME = "gpu-check"
LARGEST_BYTES = 60_000_000

# Of requirements/: what the checks import, with what that imports. Without torch and numpy: the machine has those that
# fit its GPU.
WHEELS = (
    "annotated-doc", "annotated-types", "click", "h5py", "lazy-loader", "markdown-it-py", "mdurl", "mpi4py", "psutil",
    "pydantic", "pydantic_core", "pygments", "rich", "shellingham", "typer", "typing-inspection", "typing_extensions",
    "xxhash",
)  # fmt: skip
OLD_PYTHON_WHEELS = ("tomli",)  # before 3.11
# h5py is built here and so not in requirements/: of the same release, with the HDF5 that its wheel holds.
BUILT_HERE = REPOSITORY / "scripts" / "setup.sh"

PROGRAMS = ("mpirun", "orted")
# Part of the C library or of any Python with torch.
LEFT_OUT = re.compile(
    r"(ld-linux|linux-vdso|libc|libm|libdl|libpthread|librt|libutil|libgcc_s|libstdc\+\+)[-.]"
)
# Components for network hardware: they would bring 30 MB of libraries, and one machine needs none of them.
NETWORKS = re.compile(r"lib(ucp|uct|ucs|ucm|fabric|psm2|psm_infinipath|ibverbs|rdmacm|efa|nl-3|oshmem)\.")
# Most machines have these, perhaps newer, and other programs there need theirs: taken only where one is missing.
SPARE = re.compile(r"lib(z|udev|cap|numa|atomic)\.")
# By ompi_info's names.
DIRECTORIES = {
    "Bindir": "bin",
    "Libdir": "lib",
    "Pkglibdir": "lib/openmpi",
    "Sysconfdir": "etc",
    "Pkgdatadir": "share",
}


class PackError(Exception):
    """The archive cannot be made; the message says what to do."""


def main() -> int:
    arguments = _parser().parse_args()
    output: Path = arguments.output
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
            root = Path(name) / NAME
            root.mkdir()
            copy_tree(root / "tree")
            pack_open_mpi(root / "openmpi")
            pack_wheels(
                root / "wheels", python_version=arguments.python_version, download=not arguments.no_wheels
            )
            shutil.copy(REPOSITORY / "scripts" / "check_gpu.sh", root / "check-gpu")
            output.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(output, "w:gz", compresslevel=9) as archive:
                archive.add(root, arcname=NAME)
    except PackError as error:
        print(f"pack_gpu_check: {error}", file=sys.stderr)
        return 1
    num_bytes = output.stat().st_size
    if num_bytes > LARGEST_BYTES:
        print(
            f"pack_gpu_check: {output} has {num_bytes / 1e6:.1f} MB, more than {LARGEST_BYTES / 1e6:g}",
            file=sys.stderr,
        )
        return 1
    print(f"{output}: {num_bytes / 1e6:.1f} MB, for Python {arguments.python_version}, {system_name()}")
    print(f"there: tar xzf {output.name} && {NAME}/check-gpu")
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
        help=f"of the machine with the GPU; default: {running}",
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


def system_name() -> str:
    return f"{os.uname().machine}, glibc {os.confstr('CS_GNU_LIBC_VERSION').split()[-1]} or newer"  # type: ignore[union-attr]


# ---------------------------------------------------------------------- the tree


def copy_tree(target: Path) -> None:
    """Copy what git does not ignore, as it is now, the compiled sums of this Python, and the commit's name."""
    names = _output("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        source = REPOSITORY / name
        if source.is_file():  # not one that is deleted and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    sums = Path("hpctrain", "reduce", "shared_memory")
    for compiled in (REPOSITORY / sums).glob("_add.*.so"):
        shutil.copy(compiled, target / sums)
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    commit = _output("git", "rev-parse", "HEAD").strip()
    (target / "COMMIT").write_text(f"{commit}{'+changes' if changed else ''}\n")


# ---------------------------------------------------------------------- Open MPI


def pack_open_mpi(target: Path) -> None:
    """Copy the Open MPI that the PATH finds, as a tree that can lie anywhere. `check_gpu.sh` sets what that takes."""
    where = open_mpi_directories()
    for kind in DIRECTORIES.values():
        (target / kind).mkdir(parents=True, exist_ok=True)
    library = next((path for path in _libmpi(where)), None)
    if library is None:
        raise PackError(
            f"no libmpi.so.40 in {where['Libdir']} or beside it: hpctrain's archive is for Open MPI 4"
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
            raise PackError(f"{path} cannot do without libraries of network hardware")
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
    """Where the installed Open MPI has its parts, by its own names for them."""
    if shutil.which("ompi_info") is None:
        raise PackError("no Open MPI on the PATH (ompi_info): install it, as `make setup` does")
    lines = _output("ompi_info", "--path", "all").splitlines()
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
    """The shared libraries that each file loads, under the names by which it asks for them, without the C library's."""
    found: dict[Path, set[Path]] = {path: set() for path in paths}
    for line in _output("ldd", *map(str, paths)).splitlines():
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


def pack_wheels(target: Path, *, python_version: str, download: bool) -> None:
    """Download the wheels for that Python. Without a network the archive has none, and the machine must have them."""
    target.mkdir()
    if not download:
        return
    major, minor = (int(part) for part in python_version.split("."))
    names = WHEELS + (OLD_PYTHON_WHEELS if (major, minor) < (3, 11) else ())
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={python_version}",
        "--dest",
        str(target),
    ]
    for platform in _platforms():
        command.append(f"--platform={platform}")
    asked = [*command, "--retries=1", "--timeout=15", *pinned(names)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return
    for wheel in target.iterdir():
        wheel.unlink()
    reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    print(
        f"no wheels in the archive ({reason}): the machine with the GPU must have {', '.join(names)}; or pack where "
        "pip finds them",
        file=sys.stderr,
    )


def _platforms() -> list[str]:
    """manylinux tags that this machine's C library, and so the target's, is new enough for."""
    machine = os.uname().machine
    newest = int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[-1])  # type: ignore[union-attr]
    return [
        *(f"manylinux_2_{minor}_{machine}" for minor in range(newest, 16, -1)),
        f"manylinux2014_{machine}",
    ]


def pinned(names: Iterable[str]) -> list[str]:
    """`name==version` of each, as requirements/ pins it."""
    pins = {}
    for file in ("runtime.txt", "constraints.txt"):
        for line in (REPOSITORY / "requirements" / file).read_text().splitlines():
            if found := re.match(r"([\w.-]+)==([^\s;]+)", line):
                pins[found[1]] = found[2]
    pins["h5py"] = re.search(r"^H5PY_VERSION=(\S+)", BUILT_HERE.read_text(), re.MULTILINE)[1]  # type: ignore[index]
    return [f"{name}=={pins[name]}" for name in names]


def _output(*words: str) -> str:
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PackError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
