"""Waits for a state of threads and processes, and tells the state of a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks_launcher import Launched


def wait_for(
    condition: Callable[[], Any],
    *,
    launched: Launched | None = None,
    says: Callable[[], object] = lambda: "",
    timeout_s: float = 300.0,
    every_s: float = 0.05,
) -> Any:
    """Returns the first value of `condition` that is true.

    Raises AssertionError after `timeout_s`, or when `launched` has ended, with its output and what `says` returns.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        has_ended = launched is not None and launched.process.poll() is not None
        if has_ended or time.monotonic() > deadline_s:
            output = "" if launched is None else launched.stdout + launched.stderr
            words = "the process has ended" if has_ended else f"not within {timeout_s:g} s"
            raise AssertionError(f"{words}: {says()}\n{output}")
        time.sleep(every_s)
    return found


def state_of(pid: int) -> str:
    """Returns the letter that Linux has for the state of a process; "gone" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def is_alive(pid: int) -> bool:
    """False for a process that has ended and was not waited for, too."""
    return state_of(pid) not in ("gone", "Z", "X")
