"""What surrounds the start of communication."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from hpctrain.comm.backends.mpi_process.exit_status import explained_exit
from hpctrain.comm.lifetime.start_deadline import start_deadline
from hpctrain.errors import ExitCode, LaunchError
from hpctrain.launch import RANK_PID_VARIABLE, RankIdentity, describe_outer_rank


@contextlib.contextmanager
def starting(identity: RankIdentity, *, timeout_s: float) -> Iterator[None]:
    """For the block that opens the world. Collective over all ranks that the launcher started.

    All ranks end with exit code 6 if one of them does not start within `timeout_s`, and with 5 where MPI cannot start.
    Raises LaunchError if another process is this rank already.
    """
    if identity.num_ranks == 1:
        yield
        return
    outer = describe_outer_rank(os.environ)
    if outer is not None:
        raise LaunchError(
            f"this process is not rank {identity.rank} of {identity.launcher}, but was started by it: by {outer}. MPI "
            "takes one process as a rank. Have a program that a rank starts run without MPI's variables: in Python "
            "subprocess.run(..., env={'PATH': os.environ['PATH']}), in a shell `env -i`; or start it with a launcher "
            "of its own, outside of the ranks"
        )
    words = (
        f"hpctrain: rank {identity.rank} on {socket.gethostname()}: MPI could not start, and has ended this process "
        "with exit code %d; what it says stands above. Often this process is the second one that one rank starts, and "
        "MPI starts only once in a rank: give the second one a launch of its own. Otherwise `hpctrain doctor`, started "
        "as this program was, says what is missing\n"
    )
    with (
        start_deadline(identity, timeout_s=timeout_s),
        explained_exit(words, exit_code=int(ExitCode.LAUNCH)),
    ):
        yield
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
