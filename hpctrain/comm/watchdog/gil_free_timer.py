"""The end of a rank whose Python stands still: a timer of the C library, which needs no lock of Python's.

Horovod's enqueue waits, with Python's lock held, while its own thread waits for a rank that is cut off: then no
thread of ours runs, and no deadline of ours holds. A timer that the watcher winds again and again starts, when
it is not wound any more, this file as a program of its own; that says what it finds in the ranks' files and on
the network, and when it returns, the rank's process ends with the exit code. From its start to its end the process
ignores SIGINT and SIGQUIT, as system(3) has it; that is also so for a rank which was suspended and goes on.

glibc on Linux only; elsewhere `wind_up` gives None. The timer's thread runs two calls one after the other by
contexts that are linked: system(command), then _exit(code). See makecontext(3), timer_create(2).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import shlex
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

_SIGEV_THREAD = 2
_CLOCK_MONOTONIC = 1
# Offsets in ucontext_t, the same on x86-64 and aarch64: uc_link, uc_stack.ss_sp, uc_stack.ss_size.
_LINK, _STACK, _STACK_BYTES = 8, 16, 32


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 64),
    )


class _Times(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "left_s", "left_ns"))


@final
class LastWord:
    """Runs `command` and then ends this process with `exit_code`, unless wound again or stopped in time.

    Runs once. Calls must come one at a time.
    """

    def __init__(self, command: Sequence[str], *, exit_code: int) -> None:
        self._c: Any = ctypes.CDLL(None, use_errno=True)
        self._command = ctypes.create_string_buffer(f"exec {shlex.join(command)} >&2".encode())
        self._memory: list[Any] = []  # what the contexts point to
        end = self._context(self._c._exit, ctypes.c_int(exit_code), link=None)
        start = self._context(self._c.system, ctypes.c_void_p(ctypes.addressof(self._command)), link=end)
        event = _Event(
            value=start,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(self._c.setcontext, ctypes.c_void_p).value,
        )
        self._timer = ctypes.c_void_p()
        if self._c.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")
        self._wound = False
        self._begun = False

    def _context(self, function: Any, argument: Any, *, link: int | None) -> int:
        """Address of a context that calls `function(argument)` and goes on with the one at `link`."""
        context, stack = ctypes.create_string_buffer(16384), ctypes.create_string_buffer(262144)
        self._memory += [context, stack]
        address = ctypes.addressof(context)
        if self._c.getcontext(ctypes.c_void_p(address)):
            raise OSError(ctypes.get_errno(), "getcontext")
        ctypes.c_void_p.from_address(address + _LINK).value = link
        ctypes.c_void_p.from_address(address + _STACK).value = ctypes.addressof(stack)
        ctypes.c_size_t.from_address(address + _STACK_BYTES).value = len(stack)
        self._c.makecontext(ctypes.c_void_p(address), function, ctypes.c_int(1), argument)
        return address

    def wind(self, seconds: float) -> None:
        """Have it begin in `seconds`, unless it has begun: then its memory is in use, and it stays so."""
        self._set(seconds)

    def stop(self) -> None:
        """Have it not begin, until it is wound again."""
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        if self._begun:
            return
        whole = int(seconds)
        times, before = _Times(left_s=whole, left_ns=int((seconds - whole) * 1e9)), _Times()
        self._c.timer_settime(self._timer, 0, ctypes.byref(times), ctypes.byref(before))
        self._begun = self._wound and not (before.left_s or before.left_ns)
        if self._begun:
            self._c.timer_settime(self._timer, 0, ctypes.byref(_Times()), None)
        self._wound = seconds > 0


def wind_up(
    *,
    directory: Path,
    rank: int,
    num_ranks: int,
    patience_s: float,
    look_s: float,
    since: float,
    exit_code: int,
) -> LastWord | None:
    """A last word for this rank; None where the C library is another one. since: see `read_positions`."""
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    numbers = [str(value) for value in (rank, num_ranks, os.getpid(), patience_s, look_s, since)]
    try:
        # -I: neither this file's folder nor the user's go before the standard library.
        return LastWord([sys.executable, "-I", __file__, str(directory), *numbers], exit_code=exit_code)
    except (OSError, AttributeError):
        return None


def _speak(words: Sequence[str]) -> None:
    """The program. Returns when the rank must end; does not return when its Python runs after all."""
    directory, (rank, num_ranks, pid) = Path(words[0]), map(int, words[1:4])
    patience_s, look_s, since = map(float, words[4:7])
    # Without torch, which the packages' own __init__ would load for seconds.
    folder = Path(__file__).resolve().parent
    for name, path in (("hpctrain", folder.parents[1]), ("hpctrain.comm", folder.parent)):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    from hpctrain.comm.watchdog.host_probe import Proof, doors_of_others, host_addresses, knock, ranks_to_read
    from hpctrain.comm.watchdog.network_partition import find_cut
    from hpctrain.comm.watchdog.rank_status import position_path, read_ending, read_positions, write_position

    def written() -> float:
        return position_path(directory, rank=rank).stat().st_mtime

    before, until = written(), time.monotonic() + patience_s
    here = os.uname().nodename
    positions = read_positions(directory, ranks=ranks_to_read(range(num_ranks)), since=since)
    doors = doors_of_others(positions.values(), here=here)
    found = knock(doors, timeout_s=look_s, own=host_addresses(), proof=Proof.CONNECTION)
    while read_ending(directory, since=since) is None and time.monotonic() < until:
        time.sleep(0.2)
    while written() != before:  # it was suspended, and is awake again
        time.sleep(1.0)
        if os.getppid() != pid:
            return
    others = read_positions(directory, ranks=[rank, *ranks_to_read(range(num_ranks))], since=since)
    findings = {position.host: position.reached for position in others.values() if position.reached}
    cut = find_cut({**findings, here: found}, here=here)
    ending = read_ending(directory, since=since)
    reason = "" if ending is None else f" with rank {ending.rank} on {ending.host}: {ending.reason}"
    told = [
        f"hpctrain: rank {rank} on {here} ends{reason}",
        *cut,
        "its Python stands still inside the communication library: no stacks",
    ]
    sys.stderr.write("\n".join(told) + "\n")
    sys.stderr.flush()
    if rank in others:
        write_position(dataclasses.replace(others[rank], leaving=True), directory=directory)


if __name__ == "__main__":
    _speak(sys.argv[1:])
