"""Ends all ranks when one of them exits with an error code, by `sys.exit(3)`, `raise SystemExit(3)` or otherwise.

Python calls no hook for SystemExit, and functions registered with `atexit` do not get the exit code. Functions
registered with `on_exit` of the C library do get it. But mpi4py would finalize MPI before they run, and MPI_Finalize
waits for the other ranks. So mpi4py is configured not to finalize MPI; a function registered with `on_exit`
(`_exit_status.c`) finalizes MPI, or aborts. If mpi4py was imported before hpctrain started MPI, it is too late to
configure mpi4py: its calls of MPI_Finalize are then redirected to a function that does nothing once Python has ended.

If the C file is not compiled, mpi4py finalizes as usual, and the other ranks wait for the rank that has left, up to
the time limit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

_LIBRARY = Path(__file__).with_name("_exit_status")

_arranged: list[bool] = []  # not empty once the exit of this process is arranged


@functools.cache
def _library() -> Any:
    """Returns the compiled functions; None if they were not compiled."""
    paths = [f"{_LIBRARY}{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if os.path.exists(path)), None)
    if path is None:
        return None
    library = ctypes.CDLL(path)
    library.exit_status_started.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int)
    library.exit_status_open.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    library.exit_status_take_over.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    return library


def leave_finalizing(rc: Any) -> bool:
    """Configures mpi4py not to finalize MPI. Call it before `mpi4py.MPI` is imported.

    Returns True if `finalize_at_exit` must be called after that import; False if nothing was changed.

    rc: the object `mpi4py.rc`.
    """
    if "mpi4py.MPI" in sys.modules or not rc.initialize or rc.finalize is False or _library() is None:
        return False
    rc.finalize = False
    return True


def take_over_finalizing(mpi: Any) -> None:
    """Calls `finalize_at_exit`, and keeps mpi4py from finalizing MPI even if mpi4py was imported before hpctrain.

    May be called repeatedly; later calls do nothing.
    """
    if _library() is not None and not _arranged:
        finalize_at_exit(mpi)
        is_up = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
        _library().exit_status_take_over(os.fsencode(mpi.__file__), is_up)


def finalize_at_exit(mpi: Any) -> None:
    """Registers a function that, when this process exits, finalizes MPI, or aborts all ranks (see `end_all_on_error`).

    mpi: the module mpi4py.MPI.
    """
    _arranged.append(True)
    functions = ctypes.CDLL(mpi.__file__)
    names = ("MPI_Initialized", "MPI_Finalized", "MPI_Finalize", "MPI_Abort")
    pointers = [ctypes.cast(getattr(functions, name), ctypes.c_void_p) for name in names]
    is_pointer = mpi._sizeof(mpi.Comm) == ctypes.sizeof(ctypes.c_void_p)
    _library().exit_status_started(*pointers, mpi._addressof(mpi.COMM_WORLD), int(is_pointer))


def end_all_on_error(words: str | None, *, waiting: str | None = None) -> None:
    """Makes an exit of this process with a nonzero code end all ranks with that code, from now on.

    words: message that is printed before the ranks are ended, with %d for the code; None switches this off again.
    waiting: message that is printed when an exit with code 0 has waited a few seconds for the other ranks.
    """
    if _library() is not None:
        texts = (None if text is None else text.encode() for text in (words, waiting))
        _library().exit_status_open(*texts)
