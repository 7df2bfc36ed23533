"""Storage that several nodes have mounted, each through a faulty filesystem of its own, and ranks on them.

Everything lives in a mount namespace of this process: whatever is killed, the mounts go with the last of us.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.checkpoint.process_ranks import Ranks, start_ranks

PROGRAM = Path(__file__).with_name("faulty_filesystem.py")
_NEW_MOUNTS, _PRIVATE, _BIND, _DETACH = 0x20000, (1 << 18) | (1 << 14), 4096, 2


@functools.cache
def why_not() -> str | None:
    """Why no faulty filesystem can be mounted here; None when one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "mounting a filesystem needs Linux and root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    if shutil.which("fusermount3") is None:
        return "not installed: fuse3"
    tried = subprocess.run(
        [sys.executable, "-c", "import mfusepy"], capture_output=True, text=True, timeout=300
    )
    if tried.returncode:
        return f"mfusepy or libfuse is not installed: {tried.stderr.strip().splitlines()[-1]}"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=300)
    return f"no mount namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def own_mounts() -> None:
    """From now on what this process mounts is seen by it and its children alone."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _PRIVATE, None)


def bind(source: Path, place: Path) -> None:
    """Have `place` show what `source` shows, in this process's mount namespace."""
    _call("mount", os.fsencode(source), os.fsencode(place), None, _BIND, None)


class Mount:
    """One node's mount of the storage: a process, and the place where it is mounted."""

    def __init__(self, storage: Path, place: Path) -> None:
        self.storage, self.place = storage, place
        self.process: subprocess.Popen[str] | None = None
        place.mkdir(exist_ok=True)

    def __enter__(self) -> Mount:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(self.storage), str(self.place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self._stream("stdout").readline() == "ready\n", "the faulty filesystem did not start"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        try:
            os.listdir(self.place)
        except OSError:  # its process is dead or about to be
            return False
        return self.process is not None

    def ask(self, **request: Any) -> dict[str, Any]:
        self._stream("stdin").write(json.dumps(request) + "\n")
        answer: dict[str, Any] = json.loads(self._stream("stdout").readline())
        return answer

    def fault(self, kind: str = "none", **details: Any) -> None:
        """Count operations anew, and have one of them meet this fault."""
        self.ask(fault={"kind": kind, **details})

    def operations(self) -> list[str]:
        return list(self.ask(count=True)["operations"])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process, and take away what is left of its mount."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            self.process = None
            ctypes.CDLL(None).umount2(os.fsencode(self.place), _DETACH)

    def restart(self) -> None:
        self.end()
        self.start()

    def _stream(self, name: str) -> Any:
        assert self.process is not None
        return getattr(self.process, name)


class Nodes:
    """`num_nodes` mounts of `directory/storage`; each rank sees its node's as `directory/shared`."""

    def __init__(self, directory: Path, *, num_nodes: int) -> None:
        self.storage, self.shared = directory / "storage", directory / "shared"
        for place in (self.storage, self.shared):
            place.mkdir()
        self.mounts = [Mount(self.storage, directory / f"node-{node}") for node in range(num_nodes)]

    def __enter__(self) -> Nodes:
        for mount in self.mounts:
            mount.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for mount in self.mounts:
            mount.end()

    def start_ranks(self, function: Callable[[Any], Any], *, num_ranks: int, one_node: bool = False) -> Ranks:
        """Rank r runs on node r modulo the number of nodes, or all on the first."""

        def on_its_node(world: Any) -> Any:
            own_mounts()
            node = 0 if one_node else world.rank % len(self.mounts)
            bind(self.mounts[node].place, self.shared)
            return function(world)

        return start_ranks(num_ranks, on_its_node)

    def mend(self) -> None:
        """Mount again what has died."""
        for mount in self.mounts:
            if not mount.alive:
                mount.restart()
