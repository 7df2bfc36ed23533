"""The ways in which ranks are started, as command lines."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import psutil

from benchmarks.starting import LAUNCH
from hpctrain.launch.fork_server.plan import KEY_VARIABLE

# Each rank by itself; forked, from a server that starts with them; forked, from a server that is there already.
WITHOUT, NOTHING, UP = "without", "nothing", "up"
NAMES = {
    WITHOUT: "without a fork server",
    NOTHING: "with one, from nothing",
    UP: "with one that is up already",
}
# How long a server waits for the launch that finds it up.
_LINGERS_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The command lines of one round. key: of its fork server."""

    key: str = field(default_factory=lambda: f"bench-{secrets.token_hex(4)}")

    def argv(self, kind: str, command: Sequence[str], *, num_ranks: int) -> list[str]:
        """NOTHING leaves a server, which UP finds, and which ends with the ranks of UP."""
        if kind == WITHOUT:
            return alone(WITHOUT, command, num_ranks=num_ranks)
        lingers_s = _LINGERS_S if kind == NOTHING else 0.0
        shared = [sys.executable, "-m", "benchmarks.start.launch", self.key, str(lingers_s)]
        return [*shared, "-n", str(num_ranks), "--", *command]

    def server(self) -> int | None:
        """Returns the process id of the fork server on this machine; None if there is none."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if is_server(process.cmdline()) and process.environ().get(KEY_VARIABLE, "").startswith(
                    f"{self.key}-"
                ):
                    return process.pid
        return None


def is_server(command: Sequence[str]) -> bool:
    """Whether a command line is a fork server's, and not one that contains it, as the launcher's does."""
    starts_python = bool(command) and PurePath(command[0]).name.startswith("python")
    return starts_python and any(word.endswith("/fork_server/__main__.py") for word in command)


def alone(kind: str, command: Sequence[str], *, num_ranks: int) -> list[str]:
    """The command line of a user. kind: WITHOUT or NOTHING; the server of this launch ends with its ranks."""
    forked = "--fork-server" if kind == NOTHING else "--no-fork-server"
    return [*LAUNCH, "-n", str(num_ranks), forked, "--", *command]
