"""Plans what the launcher starts in place of ranks that are to be forked: the client, with its variables."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hpctrain.launch.fork_server.likeness import is_per_rank
from hpctrain.launch.fork_server.program import Program, read_program
from hpctrain.launch.rank_identity.launcher_process import CLIENT_STEM, process_key

# Name of the server on each node: one per launch, or one for all launches of a supervisor.
KEY_VARIABLE = "HPCTRAIN_FORK_SERVER"
# Value of that variable if the user wants no server.
OFF = "off"
# For how many seconds a server waits for other clients when its last rank has ended.
LINGER_VARIABLE = "HPCTRAIN_FORK_SERVER_LINGERS_S"
# Key (`process_key`) of the process that will start further launches: when it has ended, the server no longer waits.
OWNER_VARIABLE = "HPCTRAIN_FORK_SERVER_OWNER"
# Names of modules that the server imports in addition, separated by commas.
PRELOAD_VARIABLE = "HPCTRAIN_FORK_SERVER_PRELOAD"
_ROOM_VARIABLE = "HPCTRAIN_FORK_SERVER_ROOM"  # spaces: room in the server's environment for that of a rank
_WAIT_VARIABLE = "HPCTRAIN_FORK_SERVER_WAIT_S"  # how long a client waits for the server
# Smallest number of ranks per node for a server by default: fewer ranks that import in parallel are not slower.
LEAST_RANKS = 3
_BY_ITSELF = "each rank starts by itself"
# Drivers of NVIDIA's and AMD's GPUs, and of those in WSL.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# Variables for the client alone, which the ranks do not get.
FOR_CLIENT = (KEY_VARIABLE, LINGER_VARIABLE, OWNER_VARIABLE, PRELOAD_VARIABLE, _ROOM_VARIABLE, _WAIT_VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServer:
    """Request to fork the ranks from one process per node.

    key: name of the servers. Launches share servers if they have the same key, environment variables, Python options
    and `preload`.
    lingers_s: seconds that a server without ranks waits for the next launch.
    owner: process id of a process on this machine. When that process has ended, servers no longer wait.
    preload: modules that servers import in addition to the known libraries.
    by_default: True to fork only if that saves time, was tested on such a machine, and was not switched off by the
    user.
    """

    key: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(4)}")
    lingers_s: float = 0.0
    owner: int = field(default_factory=os.getpid)
    preload: Sequence[str] = ()
    by_default: bool = False


def plan_fork_server(
    asked: ForkServer,
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    ranks_on_a_node: int,
    updates: dict[str, str],
) -> tuple[tuple[str, ...], str | None]:
    """Plans the fork server of a launch.

    Returns the words to put before the command (empty if ranks start by themselves), and a note that tells the user
    whether the ranks are forked; the note may be None. Adds variables for the launcher to `updates`. Call
    `divide_servers` when `updates` is complete.

    environ: environment of the launcher, before `updates`.
    """
    program = read_program(command)
    saves = ranks_on_a_node >= (1 if asked.lingers_s else LEAST_RANKS)
    if asked.by_default and (not saves or isinstance(program, str)):
        return (), None
    if isinstance(program, str):
        return (), f"{_BY_ITSELF}: {program}"
    client = find_client()
    if client is None:
        return (), f"{_BY_ITSELF}: {CLIENT_STEM} was not compiled (install a C compiler, then run make setup)"
    if asked.by_default and (why_not := why_not_by_default(environ)) is not None:
        return (), f"{_BY_ITSELF}: {why_not}"
    updates[KEY_VARIABLE] = asked.key
    if asked.lingers_s:
        updates[LINGER_VARIABLE] = f"{asked.lingers_s:g}"
        updates[OWNER_VARIABLE] = f"{socket.gethostname()}:{process_key(asked.owner)}"
    if asked.preload:
        updates[PRELOAD_VARIABLE] = ",".join(asked.preload)
    words = client_words(client, program)
    return words, "ranks are forked from one process of each node (docs/guides/starting.md)"


def client_words(client: str, program: Program) -> tuple[str, ...]:
    """Returns the words to put before a program's command line so that a server forks the program.

    client: path from `find_client`.
    """
    server = Path(__file__).with_name("__main__.py")
    return (client, str(Path(program.python).absolute()), *program.options, str(server), "--")


def why_not_by_default(environ: Mapping[str, str]) -> str | None:
    """Returns why ranks on this machine are not forked by default; None if they are forked by default."""
    if environ.get(KEY_VARIABLE) == OFF:
        return f"{KEY_VARIABLE}={OFF}"
    device = next((name for name in _GPU_DEVICES if os.path.exists(name)), None)
    return device and (
        f"{device} exists, and forked ranks have never been tested with GPUs (--fork-server forks them "
        "nevertheless)"
    )


def divide_servers(words: Sequence[str], *, environ: Mapping[str, str], updates: dict[str, str]) -> None:
    """Adds a hash to the key in `updates`, so that launches whose ranks cannot share a server have different keys.

    words: words from `plan_fork_server`.
    environ: environment of the launcher, before `updates`.
    """
    if words:
        variables = {**environ, **updates}
        shared = sorted(f"{name}={value}" for name, value in variables.items() if not is_per_rank(name))
        digest = hashlib.sha256(
            os.fsencode("\0".join([*words, updates.get(PRELOAD_VARIABLE, ""), *shared]))
        ).hexdigest()[:8]
        updates[KEY_VARIABLE] = f"{updates[KEY_VARIABLE]}-{digest}"


def find_client(directory: Path = Path(__file__).parent) -> str | None:
    """Returns the path of the fork server's client program; None if it was not compiled."""
    for suffix in EXTENSION_SUFFIXES:
        path = directory / f"{CLIENT_STEM}{suffix}"
        if os.access(path, os.X_OK):
            return str(path)
    return None
