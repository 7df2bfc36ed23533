"""What a fork server imports before it forks, and the checks that forking is still safe after the imports."""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpctrain.launch.fork_server.program import Program
from hpctrain.launch.rank_identity.launcher_process import YIELD_STEM

# Libraries that start no thread, no MPI and no CUDA when they are imported, with what programs use of them.
_KNOWN = {
    "torch": ("torch", "torch.nn", "torch.optim", "torch.utils.data", "torch.distributed"),
    "numpy": ("numpy",),
    "hpctrain": ("hpctrain.run.session", "torch.utils.data"),
}
# What `hpctrain train` uses.
_TRAINING = (
    "hpctrain.run.training",
    "hpctrain.run.recipe.schema",
    "hpctrain.cli.commands",
    "hpctrain.cli.train",
    "hpctrain.comm.backends.mpi_world",
    "hpctrain.tasks",
    "numpy.random",
    "torch.optim",
    "torch.profiler",
    "torch.utils.data",
)
_LIBRARIES_OF_MPI = ("libmpi.so", "libmpich.so", "libmpi_abi.so", "libmpi_cray.so")


def folder_of(program: Program, *, directory: str) -> str | None:
    """Returns the folder that a program will have first in sys.path; None with the Python options `-I` and `-P`.

    This is the folder of the script or, for `-m`, the current directory `directory`.
    """
    if getattr(sys.flags, "safe_path", sys.flags.isolated):  # safe_path: Python 3.11 and newer
        return None
    if program.script is None:
        return directory
    return os.path.dirname(os.path.realpath(os.path.join(directory, program.script)))


class Imported:
    """The modules that a server has imported, and a check whether a program would have imported the same modules."""

    def __init__(self, folder: str | None, at_start: frozenset[str]) -> None:
        """Puts `folder` first into sys.path (see `folder_of`).

        at_start: modules that Python imports before any program.
        """
        self._folder = folder
        self._at_start = at_start
        self._known: dict[str | None, str | None] = {}
        if folder is not None:
            sys.path.insert(0, folder)

    def move_to(self, folder: str | None) -> None:
        """Makes sys.path start with the folder of the program that this process becomes."""
        if self._folder is not None:
            del sys.path[0]
        if folder is not None:
            sys.path.insert(0, folder)

    def why_other(self, folder: str | None) -> str | None:
        """Returns why a program in `folder` cannot use the imported modules; None if the program can use them."""
        if folder not in self._known:
            others = (name for name in [*sys.modules] if self._is_other(name, folder))
            other = next(others, None)
            self._known[folder] = (
                other and f"{other} is another module for this program than for the fork server"
            )
        return self._known[folder]

    def _is_other(self, name: str, folder: str | None) -> bool:
        if "." in name or name in self._at_start:
            return False
        origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
        if folder is not None:
            there = importlib.machinery.PathFinder.find_spec(name, [folder])
            # A folder without __init__.py gives way to a module further on.
            if there is not None and (there.origin or origin is None):
                if there.origin is None or origin is None:
                    return True
                return os.path.realpath(there.origin) != os.path.realpath(origin)
        is_of_folder = origin is not None and self._folder is not None and _top(origin) == self._folder
        return is_of_folder and self._folder not in sys.path[1:]


def _top(origin: str) -> str:
    """Returns the folder in sys.path that contains a module's file."""
    folder, name = os.path.split(origin)
    return os.path.dirname(folder) if name.startswith("__init__.") else folder


def modules_for(program: Program, *, directory: str, preload: Sequence[str]) -> list[str]:
    """Returns the modules to import for a program: known libraries that it imports, and modules named by the user.

    The function reads the program's file, but imports no code of the user.
    """
    if program.module == "hpctrain" or (program.script and Path(program.script).name == "hpctrain"):
        found = [*_TRAINING]
    else:
        named = _imports(_file_of(program, directory=directory))
        found = [name for known, names in _KNOWN.items() if known in named for name in names]
    return [*found, *preload]


def all_are_known(preload: Sequence[str], *, libraries: str) -> bool:
    """Returns True if only known libraries, whose destructors write nothing, were loaded before the fork.

    preload: modules that the user has named.
    libraries: value of LD_PRELOAD, which may name profilers.
    """
    return {name.partition(".")[0] for name in preload} <= _KNOWN.keys() and all(
        YIELD_STEM in path for path in libraries.replace(":", " ").split()
    )


def _file_of(program: Program, *, directory: str) -> Path | None:
    if program.script is not None:
        return Path(directory, program.script)
    assert program.module is not None
    path: Sequence[str] | None = None
    spec = None
    for count in range(1, program.module.count(".") + 2):
        name = ".".join(program.module.split(".")[:count])
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if spec is not None and path:
        spec = importlib.machinery.PathFinder.find_spec(f"{program.module}.__main__", path)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _imports(file: Path | None) -> set[str]:
    """Returns the top-level packages that a file imports anywhere."""
    try:
        tree = ast.parse(file.read_bytes()) if file is not None else ast.Module(body=[], type_ignores=[])
    except (OSError, SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def import_all(names: Iterable[str]) -> str | None:
    """Imports modules. Returns why the server can no longer fork; None if forking is still possible."""
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"{name} cannot be imported before ranks are forked ({type(error).__name__}: {error})"
        if (found := _what_runs()) is not None:
            return f"importing {name} has started {found}"
    return None


def share_memory_pages() -> None:
    """Keeps as many memory pages as possible shared with forked processes.

    Call it with the garbage collector switched off since the start.
    """
    gc.freeze()


def _what_runs() -> str | None:
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS ends its threads before each fork, and starts them again when they are needed.
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if len(os.listdir("/proc/self/task")) > 1:
            return "threads"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return "CUDA"
    if any(
        "/dev/nvidia" in _target(name) or "/dev/kfd" in _target(name) for name in os.listdir("/proc/self/fd")
    ):
        return "a GPU's driver"
    if _mpi_runs():
        return "MPI"
    return None


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def _mpi_runs() -> bool:
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {
        line.split(maxsplit=5)[5] for line in maps if any(f"/{name}" in line for name in _LIBRARIES_OF_MPI)
    }
    for path in paths:
        flag = ctypes.c_int(0)
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).MPI_Initialized(ctypes.byref(flag))
        if flag.value:
            return True
    return False
