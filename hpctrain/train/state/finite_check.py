"""Says once when a checkpoint is about to hold parameters or buffers that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from hpctrain.comm import Collective, all_gather_json
from hpctrain.distributed import pipeline_of
from hpctrain.reduce import listed, not_finite


@final
class FiniteCheck:
    """say: prints a line for the user, on rank 0."""

    def __init__(self, *, comm: Collective, say: Callable[[str], None]) -> None:
        self._comm = comm
        self._say = say
        self._said = False

    def before_save(self, model: torch.nn.Module, *, step: int) -> None:
        """Checks what the checkpoint of `step` will hold of `model`. Collective; each rank reads a part of it."""
        if self._said:
            return
        comm = self._comm
        # The ranks of a pipeline hold different parameters.
        share, num_shares = (comm.rank, comm.num_ranks) if pipeline_of(model) is None else (0, 1)
        found = list(not_finite(model, share=share, num_shares=num_shares))
        num_found = torch.tensor([len(found)], dtype=torch.int64)
        comm.all_reduce(num_found)
        if not int(num_found):
            return
        self._said = True
        names = list(dict.fromkeys(name for names in all_gather_json(comm, found) for name in names))
        self._say(
            f"WARNING: the checkpoint of step {step} holds values that are not finite, in {listed(names)}: what "
            "resumes from it begins with them. Checkpoints from before are as they were"
        )
