"""Ends a rank whose Python is blocked, with a thread written in C that does not need Python's lock (the GIL).

Horovod's enqueue waits with Python's lock held while Horovod's own thread waits for a rank that is cut off. A data
transform may call C code that never releases the lock. In both cases no Python thread runs, and no deadline in Python
works. The watcher therefore keeps postponing this timer. If the watcher no longer does so, the timer runs this file as
a program, which reports what it finds in the ranks' files and on the network. When the program returns, the rank's
process ends with the exit code.

The thread is in `_gil_free_timer.c`. If that file is not compiled, `make_timer` returns None.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import sys
import time
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from hpctrain.comm.watchdog.board.node_files import WatchFolders

_LIBRARY = Path(__file__).with_name("_gil_free_timer")
_LONGEST_S = 1e9  # longer times, and infinite ones, do not fit into C's time type
# Seconds that a rank whose own input hangs waits for another rank to announce the end, since perhaps none will.
_INPUT_WAITS_S = 5.0


def find_timer_library() -> str | None:
    """Returns the path of the shared library with the timer's C thread; None if it was not compiled."""
    paths = [f"{_LIBRARY}{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for path in paths if os.path.exists(path)), None)


@final
class GilFreeTimer:
    """Runs `command` and then ends this process with `exit_code`, unless the timer is set again or stopped in time.

    Two arguments are appended to the command: the seconds since the timer was set, and the `note` of `set`. Once the
    command has started, nothing stops it. Raises OSError if the thread cannot be started.
    """

    def __init__(self, library: str, command: Sequence[str], *, exit_code: int) -> None:
        # PyDLL: nothing in there waits, and giving Python's lock back would cost more than the call.
        c: Any = ctypes.PyDLL(library)
        c.gil_free_timer_new.restype = ctypes.c_void_p
        c.gil_free_timer_set.argtypes = (ctypes.c_void_p, ctypes.c_double, ctypes.c_char_p)
        c.gil_free_timer_set.restype = None
        words = (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command), None)
        self._set = c.gil_free_timer_set
        self._pid = os.getpid()  # a forked child has no such thread
        self._timer = c.gil_free_timer_new(words, ctypes.c_int(exit_code))
        if self._timer is None:
            raise OSError(
                "could not start the timer thread that ends a blocked rank: out of memory or threads"
            )

    def set(self, seconds: float, *, note: str = "") -> None:
        """Starts the command in `seconds`, unless the timer is set again or stopped before.

        note: text that the command gets as its last argument; only 1023 bytes are kept.
        """
        if os.getpid() == self._pid:
            self._set(self._timer, min(max(seconds, 1e-3), _LONGEST_S), note.encode(errors="replace"))

    def stop(self) -> None:
        """Stops the timer: the command does not start until `set` is called again."""
        if os.getpid() == self._pid:
            self._set(self._timer, 0.0, b"")


def make_timer(
    folders: WatchFolders | None,
    *,
    rank: int,
    wait_s: float,
    probe_s: float,
    since: float,
    exit_code: int,
) -> GilFreeTimer | None:
    """Returns the timer of this rank; None if the timer was not compiled or cannot be started.

    folders: folders of the ranks' files; None before they are known. Then the program reports only its arguments.
    wait_s: seconds that the program waits for another rank to announce the end of the run.
    probe_s: time limit of the program's probes of other hosts.
    since: start of this attempt of the run, in seconds since 1970; older files belong to an earlier attempt.
    """
    library = find_timer_library()
    if library is None:
        return None
    # -I: neither this file's folder nor the user's come before the standard library.
    command = [sys.executable, "-I", __file__]
    if folders is None:
        command += ["", "", str(rank)]
    else:
        placement = folders.placement
        numbers = (rank, folders.node, placement.num_nodes, os.getpid(), wait_s, probe_s, since)
        command += [str(folders.shared.resolve()), str(folders.local), *map(str, numbers)]
    try:
        return GilFreeTimer(library, command, exit_code=exit_code)
    except OSError:
        return None


def _describe_blocked(seconds: str, note: str) -> list[str]:
    """Returns lines for the user about what blocks Python.

    seconds: seconds since the timer was set.
    note: the input that this process was producing; "" if none.
    """
    if not note:
        return ["its Python interpreter is blocked inside the communication library: no stacks"]
    return [
        f"its Python interpreter has been blocked for {seconds} s by C code that holds the GIL: no stacks. What this "
        f"rank was preparing when it blocked: {note}",
        "other ranks are not the cause: the transform, the dataset or the filesystem hangs; if it is only slow, "
        "raise run.timeout_s or limits.input_s, or run the transform in worker processes (data.workers)",
    ]


def _say(*lines: str) -> None:
    sys.stderr.write("hpctrain: " + "\n".join(lines) + "\n")
    sys.stderr.flush()


def _report(words: Sequence[str]) -> None:
    """Runs this file as a program: reports on the blocked rank, and returns when the rank must end.

    words: arguments of the program.

    If the rank's Python has continued after all, this function waits until the rank's process has ended by itself.
    """
    number, (seconds, note) = words[2], words[-2:]
    if note:  # print at once, because another rank may be about to end this one
        _say(f"rank {number} on {os.uname().nodename} ends", *_describe_blocked(seconds, note))
    if not words[0]:
        return
    shared, local = map(Path, words[:2])
    rank, node, num_nodes, pid = map(int, words[2:6])
    wait_s, probe_s, since = map(float, words[6:9])
    if note:
        wait_s = min(wait_s, _INPUT_WAITS_S)
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from hpctrain.comm.watchdog.board.node_files import (
        position_path,
        read_ending,
        read_local,
        read_node,
        read_nodes,
        status_of_node,
        time_of,
        wait_for_ending,
        write_node,
        write_position,
    )
    from hpctrain.comm.watchdog.board.rank_status import RankPosition
    from hpctrain.comm.watchdog.host_probe import (
        MAX_HOSTS,
        ProbeTarget,
        find_cut,
        host_addresses,
        probe_hosts,
        targets_of_others,
    )

    mine = position_path(local, rank=rank)
    before, until = time_of(mine), time.monotonic() + wait_s
    here, own_addresses = os.uname().nodename, host_addresses()
    drawn = random.sample(range(num_nodes), min(num_nodes, MAX_HOSTS))
    statuses, _ = read_nodes(shared, nodes=drawn, since=since, within_s=probe_s)
    targets = [
        ProbeTarget(host=status.host, addresses=status.addresses, port=status.port)
        for status in statuses
        if status.port is not None
    ]
    found = probe_hosts(targets_of_others(targets, here=here), timeout_s=probe_s, own=own_addresses)
    wait_for_ending(shared, since=since, within_s=until - time.monotonic())
    while time_of(mine) != before:  # the rank was suspended, and has continued
        time.sleep(1.0)
        if os.getppid() != pid:
            return
    statuses, _ = read_nodes(shared, nodes=drawn, since=since, within_s=probe_s)
    findings = {status.host: status.reached for status in statuses if status.reached}
    cut = find_cut({**findings, here: found}, here=here)
    ending = read_ending(shared, since=since)
    reason = "" if ending is None else f" with rank {ending.rank} on {ending.host}: {ending.reason}"
    if not note:
        _say(f"rank {rank} on {here} ends{reason}", *cut, *_describe_blocked(seconds, note))
    own = read_local(local).get(rank, RankPosition(rank=rank, host=here, pid=pid, written=time.time()))
    write_position(dataclasses.replace(own, reached=found, leaving=True), local=local)
    # The ranks of this node may all be blocked, so that none of them writes the node's file.
    last = read_node(shared, node=node, since=since)
    status = status_of_node(
        read_local(local), node=node, host=here, now=time.time(), probed_within_s=wait_s + probe_s,
        addresses=() if last is None else last.addresses, port=None if last is None else last.port,
    )  # fmt: skip
    write_node(status, shared=shared, rank=rank)


if __name__ == "__main__":
    _report(sys.argv[1:])
