"""What scripts/setup.sh finds on a machine: programs that only say what they are, and folders of libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts" / "setup.sh"
# Debian's HDF5 has a fixed place, and is there where these tests run or not.
MISSING = r"g\+\+ libopenmpi-dev openmpi-bin( libhdf5-openmpi-dev)? hdf5-tools$"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def be_user(tmp_path: Path, number: int) -> None:
    (tmp_path / "bin" / "id").unlink(missing_ok=True)
    write_program(tmp_path / "bin" / "id", f"echo {number}")


def set_up(*words: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", SCRIPT, *words], env=variables, capture_output=True, text=True, timeout=300, check=False
    )


def environment(folder: Path, *, cuda: str | None, version: str = "2.13.0") -> Path:
    """An environment with a torch that says it was built with `cuda`. Returns its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(
        "raise ImportError('libcuda.so.1: not on a login node')\n"
    )
    (packages / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    return packages


def cuda_toolkit(folder: Path, *, release: str) -> Path:
    write_program(folder / "bin" / "nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.20"')
    return folder


def nccl(folder: Path, *, library: str = "lib/libnccl.so.2") -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "nccl.h").write_text(
        '#define NCCL_MAJOR 2\n#define NCCL_MINOR 21\n#define NCCL_PATCH 5\n#define NCCL_SUFFIX ""\n'
    )
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    (folder / library).touch()
    return folder


def hdf5(folder: Path, *, parallel: bool) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "H5public.h").write_text(
        "#define H5_VERS_MAJOR 1\n#define H5_VERS_MINOR 14\n#define H5_VERS_RELEASE 3\n"
    )
    pubconf = "#define H5_HAVE_PARALLEL 1\n" if parallel else "/* #undef H5_HAVE_PARALLEL */\n"
    (folder / "include" / "H5pubconf.h").write_text(pubconf)
    return folder


def planned(name: str, result: subprocess.CompletedProcess[str]) -> str:
    found = re.search(rf"^{name} +(.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    return found[1]
