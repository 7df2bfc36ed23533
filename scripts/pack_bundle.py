#!/usr/bin/env python3
"""Packs all that `make setup` downloads into one archive, for a cluster without network.

    make bundle                                     # for this Python and this C library
    make bundle PYTHON_VERSION=3.12 GLIBC=28        # for a cluster with Python 3.12 and glibc 2.28
    python scripts/pack_bundle.py --torch 2.13.0+cpu --torch-index URL      # torch from another index than pip's
    python scripts/pack_bundle.py --torch site --runtime-only               # the cluster has its own torch

    tar xf hpctrain-bundle-*.tar && cd hpctrain-bundle/tree && make setup BUNDLE=..    # on the cluster

The archive holds wheels, the sources of what is built there against the cluster's MPI and HDF5 (mpi4py, h5py, Horovod)
with the tools to build them, the working tree, and a manifest with the SHA-256 of each wheel and source. This machine
needs Python with pip, git, and the processor architecture of the cluster; no MPI, HDF5 or compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packing import PIP, REPOSITORY, PackError, Target, copy_tree, newest_glibc
from setup_bundle import FORMAT, MANIFEST, NAME, asked_versions, sha256_of
from setup_requirements import built_here, lines, name_of, pins, requirements

SOURCES = ("mpi4py", "h5py", "horovod")
# pip asks a source for its metadata, which runs its setup.py with these.
TOOLS = ("setuptools", "wheel", "packaging", "cython", "pkgconfig")
SITE = "site"


def main() -> int:
    arguments = _parser().parse_args()
    try:
        made = pack(
            Target(python=arguments.python_version, glibc=arguments.glibc),
            torch=arguments.torch,
            torch_index=arguments.torch_index,
            tests=not arguments.runtime_only,
            into=arguments.output,
        )
    except PackError as error:
        print(f"pack_bundle: {error}", file=sys.stderr)
        return 1
    print(f"{made}: {made.stat().st_size / 1e6:,.1f} MB")
    print(f"there: tar xf {made.name} && cd {NAME}/tree && make setup BUNDLE=..")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    running = "{}.{}".format(*sys.version_info)
    parser.add_argument(
        "--python-version",
        type=_python_version,
        default=running,
        metavar="3.N",
        help=f"Python version of the cluster, 3.10 to 3.14; default: {running}",
    )
    parser.add_argument(
        "--glibc",
        type=int,
        default=newest_glibc(),
        metavar="N",
        help=f"the cluster's C library is 2.N or newer (`ldd --version`); default: {newest_glibc()}",
    )
    parser.add_argument(
        "--torch",
        default="",
        metavar="VERSION",
        help=f"such as 2.13.0+cpu or 2.7.1+cu126; `{SITE}`: none, the cluster's own is used; default: the pinned one",
    )
    parser.add_argument(
        "--torch-index", metavar="URL", help="a further index of packages, which has that torch"
    )
    parser.add_argument(
        "--runtime-only", action="store_true", help="without the packages of the tests and the documentation"
    )
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "build", metavar="DIRECTORY", help="default: build"
    )
    return parser


def _python_version(text: str) -> str:
    if not re.fullmatch(r"3\.1[0-4]", text):
        raise argparse.ArgumentTypeError(f"hpctrain needs Python 3.10 to 3.14, not {text}")
    return text


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def pack(target: Target, *, torch: str, torch_index: str | None, tests: bool, into: Path) -> Path:
    """Makes the archive in the directory `into` and returns its path. Raises PackError if anything cannot be had."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bundle-", dir=into) as name:
        root, tools = Path(name) / NAME, Path(name) / "tools"
        root.mkdir()
        say("tools for this Python")
        get_tools(tools)
        say(f"wheels for {target}")
        get_wheels(root / "wheels", target=target, torch=torch, torch_index=torch_index, tests=tests)
        say(f"sources of {', '.join(SOURCES)}")
        get_sources(root / "sources", tools=tools)
        say("working tree and manifest")
        copy_tree(root / "tree")
        manifest = describe(root, target=target, tests=tests)
        made_for = f"cp3{target.minor}-{target.machine}-glibc2.{target.glibc}"
        archive = into / f"{NAME}-{manifest['hpctrain']}-{made_for}.tar"
        say("archive")
        write_archive(root, manifest, archive=archive)
    return archive


# ---------------------------------------------------------------------- pip


def get_tools(directory: Path) -> None:
    """Installs what `get_sources` and `missing` need, for the Python that runs this, and lets it be imported."""
    versions = pins(lines("build.txt"))
    pip("install", f"--target={directory}", *(f"{name}=={versions[name]}" for name in TOOLS))
    sys.path.insert(0, str(directory))


def get_wheels(directory: Path, *, target: Target, torch: str, torch_index: str | None, tests: bool) -> None:
    """Downloads what `make setup` asks pip for on that machine, with what it needs there."""
    known = target.pinned()
    asked = pins([*requirements(tests=tests), *lines("build.txt")], minor=target.minor) | built_here()
    download = ["download", *target.pip_options, f"--dest={directory}"]
    # Without dependencies: pip evaluates conditions such as python_version < "3.11" for the Python that it runs with,
    # and would download a torch that the cluster has.
    pip(*download, "--no-deps", *(f"{n}=={v}" for n, v in asked.items() if n not in ("torch", "horovod")))
    if torch != SITE:
        index = [f"--extra-index-url={torch_index}"] if torch_index else []
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("".join(f"{n}=={v}\n" for n, v in known.items() if n != "torch"))
            constraints.flush()
            # Its CUDA parts, if any, are not pinned here.
            pip(*download, *index, f"--constraint={constraints.name}", f"torch=={torch or known['torch']}")
    while needed := missing(directory, python=target.python) - {"torch"}:
        if unknown := needed - known.keys():
            raise PackError(
                f"requirements/constraints.txt has no version of {', '.join(sorted(unknown))}: add it"
            )
        pip(*download, "--no-deps", *(f"{name}=={known[name]}" for name in sorted(needed)))


def missing(wheels: Path, *, python: str) -> set[str]:
    """Returns the names of the packages that wheels in a directory need on that Python and that are not there."""
    from packaging.requirements import Requirement

    needs: dict[str, list[Requirement]] = {}
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode())
        lines_of = metadata.get_all("Requires-Dist") or ()
        needs[name_of(path.name.split("-")[0])] = [Requirement(line) for line in lines_of]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    wanted = {(name, "") for name in needs}  # packages, each with one of its extras or none
    looked_at: set[tuple[str, str]] = set()
    while new := wanted - looked_at:
        looked_at |= new
        for name, extra in new:
            for need in needs.get(name, ()):
                if need.marker is None or need.marker.evaluate(environment | {"extra": extra}):
                    wanted |= {(name_of(need.name), e) for e in ("", *need.extras)}
    return {name for name, _ in wanted} - needs.keys()


def get_sources(directory: Path, *, tools: Path) -> None:
    """Downloads the sources of what is built on the cluster."""
    versions = pins(requirements(tests=False)) | built_here()
    asked = [f"{name}=={versions[name]}" for name in SOURCES]
    # pip runs each setup.py for its metadata, in the source's own folder; Horovod's finds no packaging in an
    # environment of pip's own.
    options = ["--no-deps", "--no-build-isolation", "--no-binary=:all:"]
    pip("download", *options, f"--dest={directory}", *asked, PYTHONPATH=str(tools.absolute()))


def pip(*words: str, **variables: str) -> None:
    """Runs pip and prints a line for each file that it takes. Raises PackError with what it says if it fails."""
    said = []
    with subprocess.Popen(
        [*PIP, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | variables,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            # "Downloading rich-14.3.3-py3-none-any.whl (310 kB)", "Processing /mirror/rich-14.3.3-py3-none-any.whl"
            if found := re.match(
                r"\s*(?:Downloading|Using cached|Processing) (?:.*/)?(\S+\.(?:whl|tar\.gz|zip))\b(.*)", line
            ):
                print(f"    {found[1]}{found[2]}", flush=True)
    if process.returncode != 0:
        raise PackError("pip cannot get what is needed:\n" + "".join(said[-20:]))


# ---------------------------------------------------------------------- the archive


def describe(root: Path, *, target: Target, tests: bool) -> dict[str, Any]:
    """Returns the manifest of a folder with wheels and sources; `setup_bundle.py` says what its fields mean."""
    files = {}
    for path in sorted([*root.glob("wheels/*"), *root.glob("sources/*")]):
        with path.open("rb") as file:
            digest = sha256_of(file)
        files[path.relative_to(root).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    version = re.search(r'__version__ = "([^"]+)"', (REPOSITORY / "hpctrain" / "version.py").read_text())
    torch = next(root.glob("wheels/torch-*.whl"), None)
    return {
        "format": FORMAT,
        "hpctrain": version[1] if version else "",
        "python": target.python,
        "machine": target.machine,
        "glibc": target.glibc,
        "torch": torch.name.split("-")[1] if torch else None,
        "tests": tests,
        "requirements": asked_versions(tests=tests, minor=target.minor),
        "files": files,
    }


def write_archive(root: Path, manifest: dict[str, Any], *, archive: Path) -> None:
    """Writes manifest, wheels, sources and tree, in this order, into an uncompressed archive: wheels are compressed."""
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for name in (MANIFEST, "wheels", "sources", "tree"):
            tar.add(root / name, arcname=f"{NAME}/{name}")
    partial.replace(archive)


if __name__ == "__main__":
    sys.exit(main())
