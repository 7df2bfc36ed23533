"""Error feedback: a rank's residual, the part of its gradient not yet sent, is added to its next gradient
(Seide et al. 2014).

Residuals are kept in gradient space, the concatenation of all flattened trainable parameters in the optimizer's order,
so that they do not depend on the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from hpctrain.errors import CheckpointError
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.contract.saved_rows import rows_in, shapes_of
from hpctrain.storage import part_of

NAME = "residual"
# Residuals of the engine's codecs, with one row per node: see `EngineLosses.state`.
LOST = "lost"


def gradient_space(buckets: Sequence[Bucket]) -> tuple[dict[int, int], int]:
    """Returns each parameter's offset in gradient space, and the length of that space, in elements. Pure.

    buckets: a plan, which contains every trainable parameter.
    """
    numels = {slot.parameter: slot.numel for bucket in buckets for slot in bucket.slots}
    positions, total = {}, 0
    for parameter in sorted(numels):
        positions[parameter] = total
        total += numels[parameter]
    return positions, total


@final
class Residuals:
    """This rank's residuals, one row of a global tensor of shape (num_ranks, elements).

    Keeps two rows: the one at the start of a step, and the new one, which takes effect only if the step is applied.
    In the unit of the buckets: gradients times loss scale. float32, or float64 if any bucket is.
    """

    def __init__(self, *, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._positions: dict[int, int] = {}
        self._row = torch.zeros(0)
        self._left = torch.zeros(0)

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        """Allocates residuals for the buckets' parameters; keeps the values if the parameters are unchanged."""
        before = self._positions, self._row
        self._positions, total = gradient_space(buckets)
        wide = any(bucket.dtype is torch.float64 for bucket in buckets)
        self._row = torch.zeros(total, dtype=torch.float64 if wide else torch.float32, device=device)
        if before[0] == self._positions and before[1].numel() == total:
            self._row.copy_(before[1])
        self._left = self._row.clone()

    def of(self, slot: Slot) -> torch.Tensor:
        """Residual of one parameter at the start of the step, shape (slot.numel,); read-only."""
        begin = self._positions[slot.parameter]
        return self._row[begin : begin + slot.numel]

    def left(self, slot: Slot) -> torch.Tensor:
        """New residual of one parameter, shape (slot.numel,); must be written in every step."""
        begin = self._positions[slot.parameter]
        return self._left[begin : begin + slot.numel]

    def settle(self, *, applied: bool, rescale: float) -> None:
        """Ends the step. If it was `applied`, the new residuals replace the old ones.

        rescale: the loss scale of the next step divided by that of this step; residuals are multiplied by it.
        """
        if applied:
            self._row, self._left = self._left, self._row
        if rescale != 1.0:
            self._row.mul_(rescale)

    def add_to(self, memory: torch.Tensor, bucket: Bucket) -> None:
        """Adds the residual of each of the bucket's parameters to `memory`, shape (bucket.numel,)."""
        for slot in bucket.slots:
            memory[slot.offset : slot.offset + slot.numel] += self.of(slot)

    def state(self) -> list[StateTensor]:
        total = self._row.numel()
        return [StateTensor(
            name=NAME, tensor=self._row.view(1, total), global_shape=(self._num_ranks, total),
            offset=(self._rank, 0),
        )]  # fmt: skip

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """See `BucketReducer.rows_to_load`: this rank's row, or its share of the rows of another number of ranks."""
        name = _saved_name(shapes)
        if name is None or len(shapes[name]) != 2:
            return {}
        num_rows = shapes[name][0]
        if name == NAME and num_rows == self._num_ranks:
            return {name: [range(self._rank, self._rank + 1)]}
        return {name: [range(*part_of(num_rows, part=self._rank, num_parts=self._num_ranks))]}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Restores this rank's row. If the number of ranks differs, each takes the sum of its share of the rows.

        So each residual is sent exactly once. Without saved residuals all start at 0.
        Raises CheckpointError if the residuals are of another model.
        """
        self._row.zero_()
        shapes = shapes_of(tensors) if shapes is None else shapes
        name = _saved_name(shapes)
        if name is None:
            return
        if len(shapes[name]) != 2 or shapes[name][1] != self._row.numel():
            raise CheckpointError(
                f"the checkpoint's residuals have shape {tuple(shapes[name])}, this model needs "
                f"(ranks, {self._row.numel()}): resume with the same model and frozen parameters as the saved run"
            )
        rows = rows_in(tensors[name], rows=self.rows_to_load(shapes)[name])
        self._row.copy_(rows.sum(dim=0, dtype=torch.float64))


def _saved_name(shapes: Shapes) -> str | None:
    return next((name for name in (NAME, LOST) if name in shapes), None)
