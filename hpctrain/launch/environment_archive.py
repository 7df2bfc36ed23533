"""Packs a Python environment into one archive for the local disks of the nodes, from which ranks then import.

N ranks that import from a shared filesystem look up some thousand paths each, at the same moment. An archive is one
file, which each node reads once, and plain `tar` unpacks it.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.storage import filesystem_of

_DEBIAN_PACKAGES = "lib/python3/dist-packages"
TOP = "environment"  # the archive's only folder
# A script that runs the `python` of its own folder, wherever that is: the shell executes the second line and Python
# reads it as a string. pip writes the same where an interpreter's path is too long for `#!`.
_RELOCATABLE = b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n'
_SHEBANG = re.compile(rb"#!(?P<python>\S*/bin/python\S*)[^\n]*\n")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What was packed.

    with_python: True if the interpreter and its standard library were packed too.
    editable: packages that are installed as a link to their source, which was not packed.
    """

    num_files: int
    num_bytes: int
    with_python: bool
    editable: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PythonPlaces:
    """The folders of a Python environment.

    prefix: folder of the environment.
    base: folder of the Python from which the environment was created, if it is a virtual environment; otherwise the
    same as `prefix`.
    library: folder of the standard library relative to `prefix` or `base`, such as `lib/python3.11`.
    """

    prefix: Path
    base: Path
    library: Path

    @classmethod
    def here(cls) -> PythonPlaces:
        """Returns the folders of this process's environment."""
        library = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}"
        return cls(prefix=Path(sys.prefix), base=Path(sys.base_prefix), library=library)

    @property
    def is_virtual(self) -> bool:
        return self.prefix != self.base


def pack_environment(
    archive: Path,
    *,
    places: PythonPlaces | None = None,
    with_python: bool | None = None,
    progress: Callable[[int], object] = lambda num_files: None,
) -> Packed:
    """Writes the environment to `archive`, an uncompressed tar file.

    An older archive is replaced when the new one is complete.

    with_python: True to also pack the interpreter and its standard library, which a virtual environment only refers
    to. None to pack them only if they are on a shared filesystem. If they are packed, packages that are installed for
    the interpreter itself are packed too, provided that the environment uses these packages.
    progress: function that is called now and then with the number of files that were packed so far.

    Raises LaunchError if the environment cannot be read or the archive cannot be written.
    """
    places = places or PythonPlaces.here()
    if with_python is None:
        with_python = places.is_virtual and filesystem_of(places.base).is_shared
    interpreter = places.prefix / "bin" / "python"
    if not interpreter.exists():
        raise LaunchError(f"{places.prefix} is not a Python environment: there is no {interpreter}")
    num_files = num_bytes = 0
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_name(f".{archive.name}.{os.getpid()}.partial")
        try:
            with tarfile.open(partial, mode="w") as tar:
                for path, name in _files_of(places, with_python=with_python):
                    num_bytes += _add(tar, path, name=name, interpreter=interpreter if with_python else None)
                    num_files += 1
                    if num_files % 1000 == 0:
                        progress(num_files)
                if with_python and (places.base / _DEBIAN_PACKAGES).is_dir():
                    _add_debian_link(tar, places)
            partial.replace(archive)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot pack {places.prefix} into {archive}: {error}") from error
    return Packed(
        num_files=num_files, num_bytes=num_bytes, with_python=with_python, editable=tuple(_editable(places))
    )


def _files_of(places: PythonPlaces, *, with_python: bool) -> Iterator[tuple[Path, str]]:
    """Yields the files and links to pack, each with its name in the archive.

    Compiled files (`__pycache__`) are packed too: they are valid as long as the times of their source files are kept.
    """
    seen: set[str] = set()
    roots = [(places.prefix, Path())]
    left_out = ""
    if with_python and places.is_virtual:
        roots.append((places.base / places.library, places.library))
        if not _sees_packages_of_base(places.prefix):
            left_out = str(places.base / places.library / "site-packages")
    for root, below in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if os.path.join(folder, name) != left_out)
            linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in sorted([*names, *linked]):
                path = Path(folder, name)
                packed = (below / path.relative_to(root)).as_posix()
                # Without `pyvenv.cfg` Python looks for its library next to its own executable.
                if packed not in seen and not (with_python and packed == "pyvenv.cfg"):
                    seen.add(packed)
                    yield path, f"{TOP}/{packed}"


def _sees_packages_of_base(prefix: Path) -> bool:
    """Returns True if a virtual environment also uses the packages of the Python from which it was created."""
    settings = (prefix / "pyvenv.cfg").read_text(encoding="utf-8")
    return re.search(r"(?im)^include-system-site-packages\s*=\s*true\s*$", settings) is not None


def _add(tar: tarfile.TarFile, path: Path, *, name: str, interpreter: Path | None) -> int:
    """Adds a file to the archive and returns its size in bytes.

    interpreter: path of the interpreter if it is packed, otherwise None. Links in its folder are then packed as files.
    """
    if interpreter is not None and path.is_symlink() and path.parent == interpreter.parent:
        path = path.resolve()
    entry = tar.gettarinfo(str(path), arcname=name)
    if not entry.isfile():
        tar.addfile(entry)
        return 0
    with path.open("rb") as file:
        script = (
            _relocatable(file.read()) if Path(name).parent.name == "bin" and entry.size < 1 << 16 else None
        )
        if script is not None:
            entry.size = len(script)
            tar.addfile(entry, io.BytesIO(script))
        else:
            file.seek(0)
            entry.type, entry.linkname = tarfile.REGTYPE, ""  # also for a second hard link
            entry.size = os.fstat(file.fileno()).st_size
            tar.addfile(entry, file)
    return entry.size


def _add_debian_link(tar: tarfile.TarFile, places: PythonPlaces) -> None:
    """Adds the folder in which Debian's own Python looks for packages outside a virtual environment, as a link."""
    entry = tarfile.TarInfo(f"{TOP}/{_DEBIAN_PACKAGES}")
    entry.type, entry.linkname = tarfile.SYMTYPE, f"../{places.library.name}/site-packages"
    tar.addfile(entry)


def _relocatable(script: bytes) -> bytes | None:
    """Returns a script with a first line that contains no folder; None if it is not a Python script."""
    found = _SHEBANG.match(script)
    return _RELOCATABLE + script[found.end() :] if found else None


def _editable(places: PythonPlaces) -> Iterator[str]:
    """Yields the packages that are installed in editable mode (PEP 610)."""
    for path in sorted(
        (places.prefix / places.library / "site-packages").glob("*.dist-info/direct_url.json")
    ):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if content.get("dir_info", {}).get("editable"):
            yield path.parent.name.partition("-")[0]


def describe_use(archive: Path) -> str:
    """Returns the lines of a batch script that unpack the archive on every node and activate it."""
    # Without --ntasks, srun would start as many tasks per node as the job has ranks there.
    return (
        "local=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/hpctrain-$SLURM_JOB_ID\n"
        "srun --mpi=none --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 \\\n"
        f'  sh -c \'mkdir -p "$1" && tar -xf "$2" -C "$1"\' sh "$local" {shlex.quote(str(archive))}\n'
        f"export PATH=$local/{TOP}/bin:$PATH\n"
    )
