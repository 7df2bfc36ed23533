"""The ways in which ranks are started, as command lines."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.starting import LAUNCH

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
            return [*LAUNCH, "-n", str(num_ranks), "--", *command]
        lingers_s = _LINGERS_S if kind == NOTHING else 0.0
        shared = [sys.executable, "-m", "benchmarks.start.launch", self.key, str(lingers_s)]
        return [*shared, "-n", str(num_ranks), "--", *command]


def alone(kind: str, command: Sequence[str], *, num_ranks: int) -> list[str]:
    """The command line of a user. kind: WITHOUT or NOTHING; the server of this launch ends with its ranks."""
    forked = ["--fork-server"] if kind == NOTHING else []
    return [*LAUNCH, "-n", str(num_ranks), *forked, "--", *command]
