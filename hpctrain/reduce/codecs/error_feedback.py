"""Error feedback: what a rank has not delivered yet is added to its next gradient (Seide et al. 2014).

It is kept in gradient space, all trainable parameters flattened one behind another in the optimizer's order,
so that it does not depend on how the gradients are cut into buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from hpctrain.errors import CheckpointError
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import StateTensor

NAME = "residual"
# The same of the engine's codecs, in rows by node: see `EngineReducer.state`.
LOST = "lost"


def gradient_space(buckets: Sequence[Bucket]) -> tuple[dict[int, int], int]:
    """Parameter -> its first element in gradient space, and the length of that space. Pure.

    Every trainable parameter is in one of the buckets, so they tell all the lengths.
    """
    numels = {slot.parameter: slot.numel for bucket in buckets for slot in bucket.slots}
    positions, total = {}, 0
    for parameter in sorted(numels):
        positions[parameter] = total
        total += numels[parameter]
    return positions, total


@final
class Residuals:
    """This rank's row of the residuals, which make up a global tensor of shape (num_ranks, elements).

    There are two of it: what a step begins with, and what it leaves, which counts only once the step is known
    to be applied. In the unit of the buckets: gradients times loss scale. float32, or float64 where any bucket is.
    """

    def __init__(self, *, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._positions: dict[int, int] = {}
        self._row = torch.zeros(0)
        self._left = torch.zeros(0)

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        """Make room for the buckets' parameters; residuals of a plan of the same parameters are kept."""
        before = self._positions, self._row
        self._positions, total = gradient_space(buckets)
        wide = any(bucket.dtype is torch.float64 for bucket in buckets)
        self._row = torch.zeros(total, dtype=torch.float64 if wide else torch.float32, device=device)
        if before[0] == self._positions and before[1].numel() == total:
            self._row.copy_(before[1])
        self._left = self._row.clone()

    def of(self, slot: Slot) -> torch.Tensor:
        """What this step begins with for one parameter, shape (slot.numel,): to read."""
        begin = self._positions[slot.parameter]
        return self._row[begin : begin + slot.numel]

    def left(self, slot: Slot) -> torch.Tensor:
        """What this step leaves of one parameter, shape (slot.numel,): to write in every step."""
        begin = self._positions[slot.parameter]
        return self._left[begin : begin + slot.numel]

    def settle(self, *, applied: bool, rescale: float) -> None:
        """The step is over: what it left counts if it was applied. rescale: of the unit, from this step to the next."""
        if applied:
            self._row, self._left = self._left, self._row
        if rescale != 1.0:
            self._row.mul_(rescale)

    def add_to(self, memory: torch.Tensor, bucket: Bucket) -> None:
        """memory (bucket.numel,) += residual of every parameter of the bucket."""
        for slot in bucket.slots:
            memory[slot.offset : slot.offset + slot.numel] += self.of(slot)

    def state(self) -> list[StateTensor]:
        total = self._row.numel()
        return [StateTensor(
            name=NAME, tensor=self._row.view(1, total), global_shape=(self._num_ranks, total),
            offset=(self._rank, 0),
        )]  # fmt: skip

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take this rank's row; of another number of ranks, rank 0 takes the sum of all and the others start at 0.

        So what was not delivered is delivered once, whatever the ranks. No residuals: all start at 0.
        Raises CheckpointError if the residuals are of another model.
        """
        self._row.zero_()
        saved = tensors.get(NAME, tensors.get(LOST))
        if saved is None:
            return
        if saved.dim() != 2 or saved.shape[1] != self._row.numel():
            raise CheckpointError(
                f"the checkpoint's residuals are of shape {tuple(saved.shape)}, this model needs "
                f"(ranks, {self._row.numel()}): resume with the model and the frozen parameters it was made with"
            )
        if NAME in tensors and saved.shape[0] == self._num_ranks:
            self._row.copy_(saved[self._rank])
        elif self._rank == 0:
            self._row.copy_(saved.sum(dim=0, dtype=torch.float64))
