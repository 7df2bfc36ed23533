"""Ends a process with an error that is meant for the user: a message, once for the whole job, and an exit code."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import NoReturn

from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.launch.rank_identity.identity import identify

# On a loaded machine the launcher needs up to this long to notice that rank 0 has exited.
OTHERS_PRINT_AFTER_S = 5.0


def print_and_exit(error: HpctrainError) -> NoReturn:
    """Prints `error` once for the whole job, and exits with the exit code of the error.

    Rank 0 prints at once, and when it exits the launcher ends the other ranks. A rank that still runs after
    OTHERS_PRINT_AFTER_S seconds prints its own error, because rank 0 has raised no error; an agreed error is printed by
    rank 0 only.
    """
    rank = 0
    with contextlib.suppress(LaunchError):
        rank = identify(os.environ, socket.gethostname()).rank
    prefix = "hpctrain: "
    if rank != 0:
        sys.stdout.flush()
        time.sleep(OTHERS_PRINT_AFTER_S)
        if error.agreed:
            sys.exit(int(error.exit_code))
        prefix = f"hpctrain: rank {rank} on {socket.gethostname()}: "
    print(f"{prefix}{error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(int(error.exit_code))  # unloading torch takes longer than the other ranks wait
