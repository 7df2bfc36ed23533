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

    All ranks end with exit code 6 if any rank does not start within `timeout_s`. Raises LaunchError if this process is
    only a child of the rank that the launcher started, or if another program has already run as this rank.
    """
    if identity.num_ranks == 1:
        yield
        return
    outer = describe_outer_rank(os.environ)
    if outer is not None:
        raise LaunchError(
            f"this process is not itself rank {identity.rank} of {identity.launcher}: it was started by that rank, "
            f"{outer}. MPI allows one process per rank. Start such a program without MPI's environment variables: "
            "in Python with subprocess.run(..., env={'PATH': os.environ['PATH']}), in a shell with `env -i`; or "
            "launch it separately, outside of the ranks"
        )
    with start_deadline(identity, timeout_s=timeout_s):
        yield
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
