"""A control group with little memory, as a Slurm job or a container has, for the processes that a test starts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.launch import control_groups

# By version: the limit of memory, and what keeps the group from using swap instead.
_LIMITS = {1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), 2: ("memory.max", "memory.swap.max")}


@contextmanager
def memory_group(num_bytes: int) -> Iterator[Path]:
    """Yields the folder of a new control group whose processes may use `num_bytes` together; the kernel kills one of
    them when they use more. At the end its processes are killed, and it is removed. Skips the test where this process
    may not make one."""
    group, version = _make()
    try:
        limit, swap = _LIMITS[version]
        (group / limit).write_text(str(num_bytes))
        with contextlib.suppress(OSError):  # a kernel that does not account for swap
            (group / swap).write_text(str(num_bytes if version == 1 else 0))
        yield group
    finally:
        _remove(group)


def in_group(group: Path, argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv`, with all processes that it starts, in the group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *argv]


def _make() -> tuple[Path, int]:
    for folder, _ in control_groups("memory"):
        if (folder / _LIMITS[1][0]).exists():
            version = 1
        elif "memory" in _read(folder / "cgroup.subtree_control").split():
            version = 2
        else:
            continue
        group = folder / f"hpctrain-test-{os.getpid()}-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            return group, version
    pytest.skip("no control group with a memory limit can be made here")


def _remove(group: Path) -> None:
    deadline_s = time.monotonic() + 300
    while group.exists():
        for each in sorted((group, *group.rglob("*/")), reverse=True):  # groups within it come first
            for pid in _read(each / "cgroup.procs").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):  # busy until the kernel has taken the last process out
                each.rmdir()
        assert time.monotonic() < deadline_s, f"{group} cannot be removed"
        time.sleep(0.05)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
