"""Starts processes of `benchmarks.data.serve` and sends them requests; makes the Python environment of the peers, which
uses the project's torch, so that all readers have the same one."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import tempfile
import venv
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.data.kinds import Kind
from benchmarks.starting import REPOSITORY

REQUIREMENTS = Path(__file__).with_name("peers.txt")
MADE = "made-from.txt"


class ReaderFailed(RuntimeError):
    """A reader could not be opened, read wrongly, or its process ended."""


class Child:
    """A process that runs the readers of one module. A context manager."""

    def __init__(self, python: Path, *, module: str, threads: int = 1) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in end)
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(Path.home()),
            "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.data.serve", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=REPOSITORY,
            env=environment,
        )  # fmt: skip

    def ask(self, do: str, **more: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018
        try:
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            raise ReaderFailed(f"{self._module} ended: {self._errors.read()[-2000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise ReaderFailed(f"{self._module}, {do}: {reply['error']}")
        return reply["answer"]

    def open(self, method: str, kind: Kind, *, directory: Path) -> None:
        self.ask(
            "open", key=f"{method} {kind.name}", method=method, kind=asdict(kind), directory=str(directory)
        )

    def check(self, method: str, kind: Kind) -> None:
        """Raises ReaderFailed unless an epoch contains every sample exactly once."""
        found = self.ask("check", key=f"{method} {kind.name}", kind=asdict(kind), epoch=0)
        if found != {
            "samples": kind.num_samples, "different": kind.num_samples, "largest": kind.num_samples - 1
        }:  # fmt: skip
            raise ReaderFailed(f"{method} does not read each of {kind.num_samples} {kind.name} once: {found}")

    def time(self, method: str, kind: Kind, *, epoch: int, least_s: float) -> float:
        """Returns samples/s over whole epochs from number `epoch` on, as many as take `least_s`."""
        found = self.ask("time", key=f"{method} {kind.name}", epoch=epoch, least_s=least_s)
        return float(found["samples"] / found["seconds"])

    def close_reader(self, method: str, kind: Kind) -> None:
        self.ask("close", key=f"{method} {kind.name}")

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


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
