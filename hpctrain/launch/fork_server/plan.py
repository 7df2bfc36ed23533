"""What the launcher starts in place of a rank that is to be forked."""

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

# The server's name on each node: one for each launch, or for those of one supervisor.
KEY_VARIABLE = "HPCTRAIN_FORK_SERVER"
# Its value where the user wants none.
OFF = "off"
# For how many seconds a server waits for other clients when its last rank has ended.
LINGER_VARIABLE = "HPCTRAIN_FORK_SERVER_LINGERS_S"
# The process that will start others, as `process_key` has it: when it has ended the server waits for nobody.
OWNER_VARIABLE = "HPCTRAIN_FORK_SERVER_OWNER"
# What it imports besides: names of modules, separated by commas.
PRELOAD_VARIABLE = "HPCTRAIN_FORK_SERVER_PRELOAD"
_ROOM_VARIABLE = "HPCTRAIN_FORK_SERVER_ROOM"  # of the client for the server
_WAIT_VARIABLE = "HPCTRAIN_FORK_SERVER_WAIT_S"  # how long a client waits for the server
# Fewer ranks on a node import in parallel what a server imports for them: by default they are not slower by themselves.
LEAST_RANKS = 3
_BY_ITSELF = "each rank starts by itself"
# Drivers of NVIDIA's and AMD's GPUs, and of those in WSL.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# Not for the ranks.
FOR_CLIENT = (KEY_VARIABLE, LINGER_VARIABLE, OWNER_VARIABLE, PRELOAD_VARIABLE, _ROOM_VARIABLE, _WAIT_VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServer:
    """Asks that ranks are forked from one process a node. key: launches share servers if they have the same key,
    variables, options of Python and `preload`. lingers_s: how long a server waits for the next launch. owner: a process
    of this machine; when it has ended, servers wait no longer. preload: modules that they import besides the known
    ones. by_default: only where it saves something and was tried, and the user has not switched it off."""

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
    """Returns the words that stand before the command, none if it is started as without, and a note that says which.

    Adds to `updates` variables of the launcher's environment, which is `environ` with them. Call `divide_servers` when
    it is complete.
    """
    program = read_program(command)
    saves = ranks_on_a_node >= (1 if asked.lingers_s else LEAST_RANKS)
    if asked.by_default and (not saves or isinstance(program, str)):
        return (), None
    if isinstance(program, str):
        return (), f"{_BY_ITSELF}: {program}"
    client = find_client()
    if client is None:
        return (), f"{_BY_ITSELF}: {CLIENT_STEM} was not compiled (a C compiler, then make setup)"
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
    """Returns the words that stand before a program's command line to have it forked. client: of `find_client`."""
    server = Path(__file__).with_name("__main__.py")
    return (client, str(Path(program.python).absolute()), *program.options, str(server), "--")


def why_not_by_default(environ: Mapping[str, str]) -> str | None:
    """Returns why ranks are not forked on this machine unless the user asks for it; None if they are."""
    if environ.get(KEY_VARIABLE) == OFF:
        return f"{KEY_VARIABLE}={OFF}"
    device = next((name for name in _GPU_DEVICES if os.path.exists(name)), None)
    return device and f"{device} is there, and forked ranks were never tried with GPUs (--fork-server)"


def divide_servers(words: Sequence[str], *, environ: Mapping[str, str], updates: dict[str, str]) -> None:
    """Gives launches whose ranks cannot share a server different keys. words: of `plan_fork_server`. environ: of the
    launcher, without `updates`."""
    if words:
        variables = {**environ, **updates}
        shared = sorted(f"{name}={value}" for name, value in variables.items() if not is_per_rank(name))
        digest = hashlib.sha256(
            os.fsencode("\0".join([*words, updates.get(PRELOAD_VARIABLE, ""), *shared]))
        ).hexdigest()[:8]
        updates[KEY_VARIABLE] = f"{updates[KEY_VARIABLE]}-{digest}"


def find_client(directory: Path = Path(__file__).parent) -> str | None:
    """Returns the path of the compiled client; None if there is none."""
    for suffix in EXTENSION_SUFFIXES:
        path = directory / f"{CLIENT_STEM}{suffix}"
        if os.access(path, os.X_OK):
            return str(path)
    return None
