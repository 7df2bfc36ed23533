"""Forks the ranks of `hpctrain train` if mpirun or srun starts them directly, without `hpctrain launch`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from hpctrain.errors import LaunchError
from hpctrain.launch.fork_server.plan import (
    KEY_VARIABLE,
    LEAST_RANKS,
    client_words,
    find_client,
    why_not_by_default,
)
from hpctrain.launch.fork_server.program import Program, read_program
from hpctrain.launch.process import STOP_VARIABLE
from hpctrain.launch.rank_identity.identity import identify
from hpctrain.launch.rank_identity.launcher_process import find_launcher_process, was_forked

# Apptainer sets it. `srun apptainer exec` makes a container for each rank, which has mounts of its own.
_OWN_CONTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


def hand_over() -> None:
    """Replaces this process by the client of a fork server, if three or more ranks of this node have been started.

    Returns only if the rank must start by itself. Under `hpctrain launch`, which has already decided how ranks start,
    this function returns at once. Call it before anything slow is imported, since each rank pays for such imports.
    """
    environ = os.environ
    if environ.get(KEY_VARIABLE) or STOP_VARIABLE in environ or was_forked(environ):
        return
    if any(environ.get(name) for name in _OWN_CONTAINER):
        return
    client = find_client()
    try:
        identity = identify(environ, socket.gethostname())
    except LaunchError:  # it is raised again where the ranks start
        return
    if client is None or identity.launcher == "none" or (identity.host_size or 1) < LEAST_RANKS:
        return
    key = find_launcher_process(environ).key()
    if key is None or why_not_by_default(environ) is not None:
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    program = read_program(command)
    if isinstance(program, Program):
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # on failure it starts by itself
            os.execve(client, [*client_words(client, program), *command], {**environ, KEY_VARIABLE: key})
