"""What pack_gpu_check.py and pack_bundle.py share: the working tree, pinned versions, wheels for another machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from setup_requirements import built_here, lines, pins

REPOSITORY = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class PackError(Exception):
    """The archive cannot be made. The message says what to do."""


def newest_glibc() -> int:
    """Returns N of this machine's C library 2.N."""
    return int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[-1])  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that wheels are for: Linux on this machine's kind of processor.

    python: its Python version, such as "3.12".
    glibc: N of its C library 2.N; wheels for older ones serve too.
    """

    python: str
    glibc: int = field(default_factory=newest_glibc)
    machine: str = field(default_factory=lambda: os.uname().machine)

    @property
    def minor(self) -> int:
        return int(self.python.split(".")[1])

    @property
    def pip_options(self) -> list[str]:
        """What makes pip choose wheels for that machine."""
        tags = [f"manylinux_2_{minor}" for minor in range(self.glibc, 16, -1)]
        # torch's own index has wheels without the name of a C library.
        tags += ["manylinux2014", "linux"]
        options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={self.python}"]
        return options + [f"--platform={tag}_{self.machine}" for tag in tags]

    def pinned(self) -> dict[str, str]:
        """Returns package name -> version, of requirements/ and of what `make setup` builds."""
        files = ("constraints.txt", "build.txt", "site.txt", "test.txt", "runtime.txt")
        found = pins([line for name in files for line in lines(name)], minor=self.minor)
        return found | built_here()

    def __str__(self) -> str:
        return f"Python {self.python}, {self.machine}, glibc 2.{self.glibc} or newer"


def copy_tree(target: Path) -> None:
    """Copies the working tree without ignored files, and writes the commit's id into COMMIT."""
    names = output("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        source = REPOSITORY / name
        if source.is_file():  # not those whose deletion is not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    changed = output("git", "status", "--porcelain", "--untracked-files=no")
    commit = output("git", "rev-parse", "HEAD").strip()
    (target / "COMMIT").write_text(f"{commit}{'+changes' if changed else ''}\n")


def output(*words: str) -> str:
    """Returns what a command prints, run in the repository. Raises PackError if it fails."""
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PackError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
