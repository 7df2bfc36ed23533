"""Error feedback of the engine: encoding errors between nodes, by parameter, for checkpoints and new plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import CheckpointError
from hpctrain.reduce.codecs.error_feedback import LOST, NAME as RESIDUAL
from hpctrain.reduce.codecs.part_feedback import CodecFeedback
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.contract.saved_rows import rows_in, shapes_of
from hpctrain.reduce.shared_memory.partition import ElemRange, TwoLevelPlace, gradient_pieces
from hpctrain.storage import part_of


@dataclass(frozen=True, slots=True)
class LossyPart:
    """A part of `bucket` that this rank encodes, and its encoding errors."""

    bucket: Bucket
    part: ElemRange
    feedback: CodecFeedback


@final
class EngineLosses:
    """This rank's encoding errors (residuals), in gradient space (see `error_feedback.py`).

    buckets: all buckets of the plan. parts: those that this rank encodes.
    """

    def __init__(
        self, buckets: Sequence[Bucket], parts: Sequence[LossyPart], *, place: TwoLevelPlace, codec_name: str
    ) -> None:
        self._parts = parts
        self._place = place
        self._codec_name = codec_name
        self.num_elems = sum(slot.numel for bucket in buckets for slot in bucket.slots)
        wide = any(bucket.dtype is torch.float64 for bucket in buckets)
        self._dtype = torch.float64 if wide else torch.float32

    def settle(self, *, applied: bool, rescale: float) -> None:
        for part in self._parts:
            part.feedback.settle(applied=applied, rescale=rescale)

    def state(self) -> list[StateTensor]:
        """Returns blocks of a tensor of shape (nodes + 1, num_elems), float32 or float64.

        Row c: errors of what node c sent; last row: errors of the sums.
        """
        shape = (self._place.num_nodes + 1, self.num_elems)
        found = []
        for position, lost, owned in self._pieces():
            here = StateTensor(
                name=LOST,
                tensor=lost.to(self._dtype)[None],
                global_shape=shape,
                offset=(self._place.node, position),
            )
            if owned:
                found.append(replace(here, offset=(self._place.num_nodes, position)))
                here = replace(here, tensor=torch.zeros_like(here.tensor))
            found.append(here)
        return found

    def rows_to_load(self, shapes: Shapes, *, rank: int, num_ranks: int) -> dict[str, list[range]]:
        """See `BucketReducer.rows_to_load`: the row of this rank's node and the last, or its share of all rows."""
        name = _saved_name(shapes)
        if name is None or len(shapes[name]) != 2:
            return {}
        if self._fits(name, shapes):
            node, last = self._place.node, self._place.num_nodes
            return {name: [range(node, node + 1), range(last, last + 1)]}
        return {name: [range(*part_of(shapes[name][0], part=rank, num_parts=num_ranks))]}

    def load_state(
        self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None, *, comm: Collective
    ) -> None:
        """Restores the errors that a checkpoint holds; does nothing if it holds none. Collective over `comm`.

        With the same number of nodes each restores its own; otherwise the owners take the sum. Raises CheckpointError
        on every rank for another model.
        """
        shapes = shapes_of(tensors) if shapes is None else shapes
        name = _saved_name(shapes)
        if name is None:
            return
        if len(shapes[name]) != 2 or shapes[name][1] != self.num_elems:
            raise CheckpointError(
                f"the checkpoint's residuals of {self._codec_name} have shape {tuple(shapes[name])}, this model needs "
                f"(rows, {self.num_elems}): resume with the same model and frozen parameters as the saved run"
            )
        wanted = self.rows_to_load(shapes, rank=comm.rank, num_ranks=comm.num_ranks)
        rows = rows_in(tensors[name], rows=wanted[name])
        if not self._fits(name, shapes):
            total = rows.sum(dim=0, dtype=torch.float64)
            comm.all_reduce(total)
            self.take_over(total)
            return
        of_node, of_sums = rows
        for position, lost, owned in self._pieces():
            part = slice(position, position + lost.numel())
            lost.copy_(of_node[part] + of_sums[part] if owned else of_node[part])

    def _fits(self, name: str, shapes: Shapes) -> bool:
        """Returns True if the saved rows are those of this run's nodes."""
        return name == LOST and shapes[name][0] == self._place.num_nodes + 1

    def total(self, comm: Collective) -> torch.Tensor:
        """Returns the sum of all ranks' errors, shape (num_elems,), float64. Collective."""
        total = torch.zeros(self.num_elems, dtype=torch.float64)
        for position, lost, _ in self._pieces():
            total[position : position + lost.numel()] += lost
        comm.all_reduce(total)
        return total

    def take_over(self, total: torch.Tensor) -> None:
        """Sets each owner's errors to `total`, shape (num_elems,), and all other errors to 0."""
        for position, lost, owned in self._pieces():
            lost.copy_(total[position : position + lost.numel()]) if owned else lost.zero_()

    def _pieces(self) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """Yields (position in gradient space, view of the errors there, True if this rank owns their sum)."""
        for lossy in self._parts:
            part, feedback = lossy.part, lossy.feedback
            own = ElemRange(part.begin + feedback.own.start, part.begin + feedback.own.stop)
            for span in (ElemRange(part.begin, own.begin), own, ElemRange(own.end, part.end)):
                for piece in gradient_pieces(lossy.bucket, span):
                    first = span.begin - part.begin + piece.first
                    yield piece.position, feedback.lost[first : first + piece.numel], span is own


def _saved_name(shapes: Shapes) -> str | None:
    return next((name for name in (LOST, RESIDUAL) if name in shapes), None)
