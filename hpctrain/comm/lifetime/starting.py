"""The context in which a rank opens its world."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hpctrain.comm.lifetime.start_deadline import start_deadline
from hpctrain.errors import LaunchError
from hpctrain.launch import RANK_PID_VARIABLE, RankIdentity, describe_outer_rank


@contextlib.contextmanager
def starting(identity: RankIdentity, *, timeout_s: float) -> Iterator[None]:
    """Guards the block that opens the world. Collective over all ranks that the launcher started.

    All ranks end with exit code 6 if one of them does not start within `timeout_s`. Raises LaunchError if another
    process is this rank, or was.
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
    with start_deadline(identity, timeout_s=timeout_s):
        yield
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
