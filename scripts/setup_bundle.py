"""Part of setup.sh: checks an archive of pack_bundle.py against this machine, and unpacks it. Standard library only.

    setup_bundle.py BUNDLE                        # prints what it is for; refuses it where it does not fit
    setup_bundle.py BUNDLE --unpack-into DIR      # compares every file with its hash, and prints what pip is to be told

BUNDLE is the archive, or the folder that came out of it, which is then used where it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from setup_requirements import built_here, lines, pins, requirements

NAME = "hpctrain-bundle"  # the archive's only folder
MANIFEST = "MANIFEST.json"
FORMAT = 1
SHOWN = 5
AGAIN = "Copy it here again, or make it anew with `make bundle`."


class BundleError(Exception):
    """The bundle cannot be used. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What the manifest says.

    python: version of the Python that the wheels are for, such as "3.12".
    machine, glibc: processor as `uname -m` names it; N of the C library 2.N that wheels need at most.
    torch: its version; None if the bundle has none, and the site's own is used.
    tests: whether it has what tests and documentation need.
    requirements: the pinned packages that it was made for, but torch, as `name==version`.
    files: path in the bundle -> size in bytes and SHA-256 in hexadecimal digits.
    """

    path: Path
    hpctrain: str
    python: str
    machine: str
    glibc: int
    torch: str | None
    tests: bool
    requirements: list[str]
    files: Mapping[str, tuple[int, str]]

    def __str__(self) -> str:
        what = f"hpctrain {self.hpctrain}, torch {self.torch or 'of the site'}"
        return f"{what}, Python {self.python}, {self.machine}, glibc 2.{self.glibc} or newer"


def asked_versions(*, tests: bool, minor: int) -> list[str]:
    """Returns what this checkout asks for on Python 3.`minor`, as `name==version`, without torch."""
    versions = pins([*requirements(tests=tests), *lines("build.txt")], minor=minor) | built_here()
    return sorted(f"{name}=={version}" for name, version in versions.items() if name != "torch")


# ---------------------------------------------------------------------- reading


def members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and the contents of each file, the manifest first. Raises TarError if the archive is cut."""
    if path.is_dir():
        for name in (MANIFEST, *sorted(f"{p.parent.name}/{p.name}" for p in path.glob("[ws]*s/*"))):
            if (path / name).is_file():
                with (path / name).open("rb") as file:
                    yield name, file
        return
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name.removeprefix(f"{NAME}/"), file


def read(path: Path) -> Bundle:
    """Reads the manifest. Raises BundleError if there is none that this version understands."""
    contents = members(path)  # held: when it goes, the archive is closed
    name, file = next(contents, ("", None))
    if name != MANIFEST or file is None:
        raise BundleError(
            f"{path} was not made by `make bundle`: it does not begin with {NAME}/{MANIFEST}. {AGAIN}"
        )
    try:
        fields: dict[str, Any] = json.load(file)
        if fields["format"] != FORMAT:
            raise BundleError(
                f"{path} has format {fields['format']}, and this checkout reads {FORMAT}: use the tree in the bundle"
            )
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in fields["files"].items()}
        if odd := [name for name in files if not re.fullmatch(r"(wheels|sources)/\w[\w.+-]*", name)]:
            raise ValueError(f"file {odd[0]!r}")
        return Bundle(
            path=path,
            hpctrain=str(fields["hpctrain"]),
            python=str(fields["python"]),
            machine=str(fields["machine"]),
            glibc=int(fields["glibc"]),
            torch=fields["torch"],
            tests=bool(fields["tests"]),
            requirements=list(fields["requirements"]),
            files=files,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} has a damaged {MANIFEST} ({error!r}). {AGAIN}") from error


def check(bundle: Bundle, *, torch_found: str) -> None:
    """Raises BundleError with all that does not fit this Python, machine and checkout.

    torch_found: version of the torch that this Python has already; "" if none.
    """
    faults = []
    running = "{}.{}".format(*sys.version_info)
    if bundle.python != running:
        faults.append(
            f"it is for Python {bundle.python}, and {sys.executable} is {running}: set PYTHON to a Python "
            f"{bundle.python} and VENV to a new folder, or make it with PYTHON_VERSION={running}"
        )
    if bundle.machine != os.uname().machine:
        faults.append(
            f"it is for {bundle.machine}, and this is {os.uname().machine}: make it on such a machine"
        )
    library = os.confstr("CS_GNU_LIBC_VERSION") or "another C library"
    glibc = re.fullmatch(r"glibc 2\.(\d+).*", library)
    if glibc is None or int(glibc[1]) < bundle.glibc:
        least = f"make it with GLIBC={glibc[1]}" if glibc else "only glibc is supported"
        faults.append(f"its wheels need glibc 2.{bundle.glibc} or newer, and this is {library}: {least}")
    if bundle.torch is None and not torch_found:
        faults.append(
            f"it has no torch, and {sys.executable} finds none: load the site's module of torch, or make it "
            "without TORCH=site"
        )
    if absent := sorted(
        {*asked_versions(tests=bundle.tests, minor=sys.version_info[1])} - {*bundle.requirements}
    ):
        faults.append(
            f"this checkout asks for {_some(absent)}, which it does not have: use the tree in the bundle, or make it "
            "from this checkout"
        )
    if faults:
        raise BundleError("\n  - ".join([f"{bundle.path} does not fit:", *faults]))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# ---------------------------------------------------------------------- unpacking


def sha256_of(source: IO[bytes], copy: IO[bytes] | None = None) -> str:
    """Returns the hash of what is left in `source`, and writes it into `copy`."""
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        if copy is not None:
            copy.write(block)
    return digest.hexdigest()


def unpack(bundle: Bundle, into: Path) -> Path:
    """Compares wheels and sources with the manifest and copies them out of an archive. Returns the folder with both.

    Raises BundleError if there is no space, or with the names of the files that are damaged or not there.
    """
    folder = bundle.path if bundle.path.is_dir() else into
    if folder == into:
        needed = sum(num_bytes for num_bytes, _ in bundle.files.values())
        free = shutil.disk_usage(into).free
        if free < needed:
            raise BundleError(
                f"{bundle.path} needs {needed / 1e6:,.0f} MB in {into.parent}, and {free / 1e6:,.0f} MB are free "
                "there: set TMPDIR to a larger place"
            )
    waiting, damaged = dict(bundle.files), []
    for name, file in members(bundle.path):
        if name not in waiting:
            continue
        _, expected = waiting.pop(name)
        if folder == into:
            (into / name).parent.mkdir(exist_ok=True)
            with (into / name).open("wb") as copy:
                found = sha256_of(file, copy)
        else:
            found = sha256_of(file)
        if found != expected:
            damaged.append(name)
    if damaged or waiting:
        both = (("damaged (SHA-256 differs)", damaged), ("not there", sorted(waiting)))
        told = "; ".join(f"{what}: {_some(names)}" for what, names in both if names)
        raise BundleError(f"{bundle.path} is damaged, of {len(bundle.files)} files: {told}. {AGAIN}")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--torch-found", default="", metavar="VERSION")
    parser.add_argument("--unpack-into", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    try:
        bundle = read(arguments.bundle)
        check(bundle, torch_found=arguments.torch_found)
        if arguments.unpack_into is None:
            print(bundle)
            return
        folder = unpack(bundle, arguments.unpack_into.resolve()).resolve()
    except (BundleError, OSError) as error:
        sys.exit(f"setup: the bundle {error}")
    except tarfile.TarError as error:
        num_bytes = arguments.bundle.stat().st_size
        sys.exit(
            f"setup: the bundle {arguments.bundle} is no whole archive ({error}; {num_bytes:,} bytes). {AGAIN}"
        )
    # Lines for setup.sh. Addresses, as pip takes a space for the end of a path.
    print((folder / "wheels").as_uri(), (folder / "sources").as_uri())
    print(bundle.torch or "")
    print("tests" if bundle.tests else "runtime")


if __name__ == "__main__":
    main()
