"""Ends all ranks when one of them exits with an error code, by `sys.exit(3)`, `raise SystemExit(3)` or otherwise.

Python calls no hook for SystemExit, and its functions of `atexit` do not get the exit code. The C library's `on_exit`
gets it. But mpi4py finalizes MPI before, which waits for the other ranks. So mpi4py is told not to, and the function of
`on_exit` (`_exit_status.c`) does it, or aborts. Where mpi4py was imported before hpctrain started MPI it is too late to
tell it: then its calls of MPI_Finalize are redirected to a function that does nothing once Python has ended.

Where that file is not compiled, mpi4py finalizes as usual: then the other ranks wait for the rank that has left, up to
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
    """The compiled functions; None if they were not compiled."""
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
    """Has mpi4py not finalize MPI; returns True if `finalize_at_exit` must be called once it is imported.

    rc: `mpi4py.rc`. Call it before `mpi4py.MPI` is imported.
    """
    if "mpi4py.MPI" in sys.modules or not rc.initialize or rc.finalize is False or _library() is None:
        return False
    rc.finalize = False
    return True


def take_over_finalizing(mpi: Any) -> None:
    """As `finalize_at_exit`, where mpi4py was imported before; only if it finalizes MPI. May be called repeatedly."""
    if _library() is not None and not _arranged:
        finalize_at_exit(mpi)
        is_up = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
        _library().exit_status_take_over(os.fsencode(mpi.__file__), is_up)


def finalize_at_exit(mpi: Any) -> None:
    """Has the exiting process finalize MPI, or abort all ranks (`end_all_on_error`). mpi: the module mpi4py.MPI."""
    _arranged.append(True)
    functions = ctypes.CDLL(mpi.__file__)
    names = ("MPI_Initialized", "MPI_Finalized", "MPI_Finalize", "MPI_Abort")
    pointers = [ctypes.cast(getattr(functions, name), ctypes.c_void_p) for name in names]
    is_pointer = mpi._sizeof(mpi.Comm) == ctypes.sizeof(ctypes.c_void_p)
    _library().exit_status_started(*pointers, mpi._addressof(mpi.COMM_WORLD), int(is_pointer))


def end_all_on_error(words: str | None, *, waiting: str | None = None) -> None:
    """From now on, an exit of this process with another code than 0 ends all ranks with that code; None: no more.

    words: printed then, with %d for the code. waiting: printed by an exit with 0 that has waited for the other ranks
    for a few seconds.
    """
    if _library() is not None:
        texts = (None if text is None else text.encode() for text in (words, waiting))
        _library().exit_status_open(*texts)
