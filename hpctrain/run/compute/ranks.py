"""The number of ranks that a recipe asks for, and the threads of each."""

from __future__ import annotations

import math
import os
from fractions import Fraction

import torch

from hpctrain.errors import TopologyError
from hpctrain.launch import RankIdentity


def check_num_ranks(identity: RankIdentity, *, ranks: int | None) -> None:
    """Raises TopologyError if `ranks` is given and another number was started."""
    if ranks is not None and identity.num_ranks != ranks:
        raise TopologyError(
            f"the recipe asks for {ranks} ranks, {identity.launcher} started {identity.num_ranks}: start it with "
            f"`hpctrain launch -n {ranks} -- ...`, mpirun -n {ranks} or srun --ntasks={ranks}, or change run.ranks"
        )


def set_threads(asked: int | None, share: Fraction) -> None:
    """Sets torch's threads: `asked`, else OMP_NUM_THREADS, else this rank's share of the cores it may run on."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, math.floor(share)))
