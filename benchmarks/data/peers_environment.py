"""The Python environment of the peers. It uses the project's torch, so that all readers have the same one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("peers.txt")
MADE = "made-from.txt"


def peers_python(directory: Path) -> Path:
    """Returns the environment's interpreter; makes the environment if it is missing or peers.txt has changed.

    Packages that the peers need in an older version (numpy) are installed into their environment and found before the
    project's. Raises RuntimeError with the end of pip's output if the installation fails.
    """
    python = directory / "bin" / "python"
    torch = f"torch=={version('torch')}\n"
    wanted = REQUIREMENTS.read_text() + torch
    made = directory / MADE
    if python.exists() and made.exists() and made.read_text() == wanted:
        return python
    venv.create(directory, clear=True, with_pip=False, symlinks=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "constraints.txt").write_text(torch)
    done = subprocess.run(
        [
            str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "-r", str(REQUIREMENTS), "-c", str(directory / "constraints.txt"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"pip cannot install the peers into {directory}: {done.stdout[-2000:]}")
    made.write_text(wanted)
    return python


if __name__ == "__main__":
    print(peers_python(Path(sys.argv[1])))
