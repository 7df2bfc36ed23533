"""Ends a rank whose Python is blocked, by a thread of the C library that needs no lock of Python's.

Horovod's enqueue waits, with Python's lock held, while its own thread waits for a rank that is cut off: then no thread
of Python runs, and no deadline of ours holds. The watcher sets this timer again and again. When it does not any more,
the timer runs this file as a program, which reports what it finds in the ranks' files and on the network; when the
program returns, the rank's process ends with the exit code.

The thread is `_gil_free_timer.c`. Where that is not compiled, `make_timer` returns None.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, final

_LIBRARY = Path(__file__).with_name("_gil_free_timer")


def find_library() -> str | None:
    """Returns the path of the compiled thread, None where it was not compiled."""
    paths = [f"{_LIBRARY}{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for path in paths if os.path.exists(path)), None)


@final
class GilFreeTimer:
    """Runs `command` and then ends this process with `exit_code`, unless it is set again or stopped in time.

    Once the command has begun, nothing stops it. Raises OSError if there is no thread to be had.
    """

    def __init__(self, library: str, command: Sequence[str], *, exit_code: int) -> None:
        c: Any = ctypes.CDLL(library)
        c.gil_free_timer_new.restype = ctypes.c_void_p
        c.gil_free_timer_set.argtypes = (ctypes.c_void_p, ctypes.c_double)
        c.gil_free_timer_set.restype = None
        words = (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command), None)
        self._set = c.gil_free_timer_set
        self._timer = c.gil_free_timer_new(words, ctypes.c_int(exit_code))
        if self._timer is None:
            raise OSError("no memory or no thread for the timer that ends a blocked rank")

    def set(self, seconds: float) -> None:
        """The command begins in `seconds`, unless this is called again before."""
        self._set(self._timer, max(seconds, 1e-3))

    def stop(self) -> None:
        """The command does not begin until `set` is called."""
        self._set(self._timer, 0.0)


def make_timer(
    *,
    directory: Path,
    rank: int,
    num_ranks: int,
    wait_s: float,
    probe_s: float,
    since: float,
    exit_code: int,
) -> GilFreeTimer | None:
    """Returns the timer of this rank, None where it was not compiled.

    directory: of the ranks' files. wait_s: how long the program waits for another rank to announce the end. probe_s:
    time limit of its probes of other hosts. since: see `read_positions`.
    """
    library = find_library()
    if library is None:
        return None
    numbers = [str(value) for value in (rank, num_ranks, os.getpid(), wait_s, probe_s, since)]
    try:
        # -I: neither this file's folder nor the user's come before the standard library.
        command = [sys.executable, "-I", __file__, str(directory), *numbers]
        return GilFreeTimer(library, command, exit_code=exit_code)
    except OSError:
        return None


def _report(words: Sequence[str]) -> None:
    """The program. Returns when the rank must end; does not return if its Python has continued after all."""
    directory, (rank, num_ranks, pid) = Path(words[0]), map(int, words[1:4])
    wait_s, probe_s, since = map(float, words[4:7])
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from hpctrain.comm.watchdog.host_probe import (
        host_addresses,
        probe,
        ranks_to_read,
        targets_of,
        targets_of_others,
    )
    from hpctrain.comm.watchdog.network_partition import find_cut
    from hpctrain.comm.watchdog.rank_status import position_path, read_ending, read_positions, write_position

    def written() -> float:
        return position_path(directory, rank=rank).stat().st_mtime

    before, until = written(), time.monotonic() + wait_s
    here = os.uname().nodename
    positions = read_positions(directory, ranks=ranks_to_read(range(num_ranks)), since=since)
    targets = targets_of_others(targets_of(positions.values()), here=here)
    found = probe(targets, timeout_s=probe_s, own=host_addresses())
    while read_ending(directory, since=since) is None and time.monotonic() < until:
        time.sleep(0.2)
    while written() != before:  # the rank was suspended, and has continued
        time.sleep(1.0)
        if os.getppid() != pid:
            return
    others = read_positions(directory, ranks=[rank, *ranks_to_read(range(num_ranks))], since=since)
    findings = {position.host: position.reached for position in others.values() if position.reached}
    cut = find_cut({**findings, here: found}, here=here)
    ending = read_ending(directory, since=since)
    reason = "" if ending is None else f" with rank {ending.rank} on {ending.host}: {ending.reason}"
    lines = [
        f"hpctrain: rank {rank} on {here} ends{reason}",
        *cut,
        "its Python interpreter is blocked inside the communication library: no stacks",
    ]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
    if rank in others:
        write_position(dataclasses.replace(others[rank], leaving=True), directory=directory)


if __name__ == "__main__":
    _report(sys.argv[1:])
