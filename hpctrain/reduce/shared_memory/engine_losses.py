"""Error feedback of the engine: what encoding has lost between nodes, by parameter, for checkpoints and new plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import CheckpointError
from hpctrain.reduce.codecs.error_feedback import LOST
from hpctrain.reduce.codecs.error_feedback import NAME as RESIDUAL
from hpctrain.reduce.codecs.part_feedback import CodecFeedback
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import StateTensor
from hpctrain.reduce.shared_memory.gradient_slices import tiles
from hpctrain.reduce.shared_memory.partition import ElemRange, TwoLevelPlace


@dataclass(frozen=True, slots=True)
class LossyPart:
    """A part of `bucket` that this rank encodes, and what its encoding has lost so far."""

    bucket: Bucket
    part: ElemRange
    feedback: CodecFeedback


@final
class EngineLosses:
    """What this rank's encodings have lost, in gradient space: the parameters one after another.

    buckets: all of the plan. parts: those that this rank encodes.
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

        Row c: lost on the way from node c; the last row: lost of the sums.
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

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores what a checkpoint holds; nothing where it holds none.

        On as many nodes each has its own again; on another number the sum goes to the owners. Raises CheckpointError
        for another model.
        """
        saved = tensors.get(LOST, tensors.get(RESIDUAL))
        if saved is None:
            return
        if saved.dim() != 2 or saved.shape[1] != self.num_elems:
            raise CheckpointError(
                f"the checkpoint's losses of {self._codec_name} are of shape {tuple(saved.shape)}, this model needs "
                f"(rows, {self.num_elems}): resume with the model and the frozen parameters it was made with"
            )
        if LOST not in tensors or saved.shape[0] != self._place.num_nodes + 1:
            self.take_over(saved.double().sum(0))
            return
        for position, lost, owned in self._pieces():
            row = saved[self._place.node, position : position + lost.numel()]
            if owned:
                row = row + saved[self._place.num_nodes, position : position + lost.numel()]
            lost.copy_(row)

    def total(self, comm: Collective) -> torch.Tensor:
        """Returns what all ranks together have lost, shape (num_elems,), float64. Collective."""
        total = torch.zeros(self.num_elems, dtype=torch.float64)
        for position, lost, _ in self._pieces():
            total[position : position + lost.numel()] += lost
        comm.all_reduce(total)
        return total

    def take_over(self, total: torch.Tensor) -> None:
        """Gives each owner what was lost of its elements; `total`: shape (num_elems,)."""
        for position, lost, owned in self._pieces():
            lost.copy_(total[position : position + lost.numel()]) if owned else lost.zero_()

    def _pieces(self) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """(position in gradient space, what was lost there (shares memory), whether this rank makes its sum)."""
        for lossy in self._parts:
            part, feedback = lossy.part, lossy.feedback
            own = ElemRange(part.begin + feedback.own.start, part.begin + feedback.own.stop)
            for span in (ElemRange(part.begin, own.begin), own, ElemRange(own.end, part.end)):
                for tile in tiles(lossy.bucket, span):
                    first = span.begin - part.begin + tile.first
                    yield tile.position, feedback.lost[first : first + tile.numel], span is own
