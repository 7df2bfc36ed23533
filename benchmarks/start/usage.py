"""Runs a command, and adds up the processor time of all processes that it starts:

    python -m benchmarks.start.usage RESULT.json COMMAND...

This process is the subreaper of the command's processes (prctl(2)): one whose parent has ended, as a fork server's has,
becomes its child. So it waits for all of them, and the kernel adds up their times on the way: those of a rank that was
forked in the server that waits for it, the server's here.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
# After the command's end the others have this time.
ENDS_IN_S = 60.0


def run(command: list[str]) -> dict[str, Any]:
    """Returns `code` (exit code, or -n after signal n), `cpu_s` (user and system) of all processes, and `left`: the
    command lines of those that have not ended in time, whose time is not counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    pid = os.posix_spawnp(command[0], command, os.environ)
    ended, status = 0, 0
    while ended != pid:  # others may become children of this process, and end, before
        ended, status = os.waitpid(-1, 0)
    left = _wait_for_others()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime, "left": left}


def _wait_for_others() -> list[str]:
    until_s = time.monotonic() + ENDS_IN_S
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if ended:
            continue
        if time.monotonic() > until_s:
            return [_command_of(pid) for pid in _children()]
        time.sleep(0.005)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run(sys.argv[2:])))
