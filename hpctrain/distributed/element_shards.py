"""A rank's elements of parameters that every rank holds whole: of these it keeps the optimizer's state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hpctrain.distributed.sharded_tensors import Box

_HELD = "_hpctrain_elements"


@dataclass(frozen=True, slots=True, eq=False)
class ElementShard:
    """This rank's elements of a parameter: those from `begin` to before `end` in its memory order; perhaps none.

    shape: of the parameter. dims: its dimensions from the outermost in memory to the innermost. part: the optimizer's
    parameter, which shares these elements with the model's: shape (end - begin,), or () of a parameter without
    dimensions.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    begin: int
    end: int
    part: torch.nn.Parameter

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The parameter's shape, outermost dimension in memory first."""
        return tuple(self.shape[dim] for dim in self.dims)

    def box_to_read(self) -> Box:
        """Returns the smallest box (offset, shape) of whole rows that holds the elements, of which `cut` takes them."""
        if not self.shape or (self.dims[0] != 0 and self.end > self.begin):
            return (0,) * len(self.shape), self.shape
        first, stop = self._rows()
        return (first, *(0 for _ in self.shape[1:])), (stop - first, *self.shape[1:])

    def cut(self, box: torch.Tensor) -> torch.Tensor:
        """Returns the elements, in the shape of `part`, of the content of `box_to_read`."""
        first = self._rows()[0] * self._row_elems() if self.shape and self.dims[0] == 0 else 0
        return self._cut(box, first=first)

    def cut_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements, in the shape of `part`, of a tensor of the parameter's shape."""
        return self._cut(tensor, first=0)

    def _cut(self, tensor: torch.Tensor, *, first: int) -> torch.Tensor:
        flat = tensor.permute(self.dims).reshape(-1)
        return flat[self.begin - first : self.end - first].reshape(self.part.shape).clone()

    def _row_elems(self) -> int:
        return math.prod(self.shape[1:])

    def _rows(self) -> tuple[int, int]:
        if self.end == self.begin:
            return 0, 0
        return self.begin // self._row_elems(), -(-self.end // self._row_elems())


def hold_elements(parameter: torch.nn.Parameter, *, begin: int, end: int) -> ElementShard:
    """Makes this rank's part of `parameter`, whose memory must have no gaps, and notes it there."""
    flat = flat_view(parameter)[begin:end]
    part = torch.nn.Parameter(flat if parameter.dim() or begin == end else flat.view(()))
    shard = ElementShard(tuple(parameter.shape), tuple(memory_order(parameter)), begin, end, part)
    setattr(parameter, _HELD, shard)
    return shard


def element_shard(parameter: torch.Tensor) -> ElementShard | None:
    """Returns which elements of a parameter this rank holds the optimizer's state of; None: it is not split so."""
    return getattr(parameter, _HELD, None)


def forget_elements(parameter: torch.nn.Parameter) -> None:
    """Undoes `hold_elements`."""
    if hasattr(parameter, _HELD):
        delattr(parameter, _HELD)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions from the outermost in memory to the innermost; unchanged for a layout with gaps."""
    dims = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return dims
    strides = tensor.stride()
    order = sorted(dims, key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else dims


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor's memory has no gaps."""
    return tensor.permute(memory_order(tensor)).is_contiguous()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the elements in memory order, shape (n,), of a tensor whose memory has no gaps."""
    return tensor.detach().permute(memory_order(tensor)).view(-1)
