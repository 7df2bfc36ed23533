"""Copies gradients and parameters between a rank's model and the memory of units. Does not communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

import torch

from hpctrain.distributed import flat_view, memory_order
from hpctrain.reduce.data_parallel.pending_gradient import NOT_READABLE_SHARDED, PendingGradient
from hpctrain.reduce.sharded.scatter_reducer import Gathered
from hpctrain.reduce.sharded.shard_plan import ShardPlan, Span


@final
class ParameterCopies:
    """The parameters of one plan; their memory has no gaps. rank: this one."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, plan: ShardPlan, rank: int) -> None:
        self._parameters = parameters
        self._flats = [flat_view(parameter) for parameter in parameters]
        self._units = plan.units
        self._packed = [unit.joined() for unit in plan.units]
        self._rank = rank
        self._pending = [PendingGradient(p, words=NOT_READABLE_SHARDED) for p in parameters]
        self._held: dict[int, torch.Tensor] = {}

    def in_place(self) -> bool:
        """Returns True while the parameters lie where they did when this was made."""
        return all(
            parameter.data_ptr() == flat.data_ptr()
            for parameter, flat in zip(self._parameters, self._flats, strict=True)
        )

    def hold(self, index: int) -> None:
        """Keeps a gradient until `take_gradients`; `.grad` cannot be used from now on."""
        gradient = self._parameters[index].grad
        if gradient is not None:
            self._held[index] = gradient
            self._parameters[index].grad = self._pending[index]

    def drop_held(self) -> None:
        """Drops the gradients that `hold` keeps."""
        self._held.clear()

    def any_is_pending(self) -> bool:
        """Returns True if a parameter's `.grad` is as `hold` has left it."""
        return any(p.grad is pending for p, pending in zip(self._parameters, self._pending, strict=True))

    def is_as_left(self, index: int, *, had: bool) -> bool:
        """Returns True if `.grad` is as `hold` has left it. had: whether there was a gradient."""
        return self._parameters[index].grad is (self._pending[index] if had else None)

    def take_gradients(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """Returns these parameters' gradients in memory order, shape (n,); without those that have none."""
        found = {}
        for index in indices:
            gradient = self._held.pop(index, self._parameters[index].grad)
            if gradient is not None:
                dense = gradient.detach()
                if dense.layout is not torch.strided:
                    dense = dense.to_dense()
                found[index] = dense.permute(memory_order(self._parameters[index])).reshape(-1)
        return found

    def pack(
        self, number: int, gradients: Mapping[int, torch.Tensor], *, factor: float, into: torch.Tensor
    ) -> None:
        """Writes the gradients of unit `number`, times `factor`, to `into`, shape (unit.numel,); zeros where there are
        none."""
        for span in self._packed[number]:
            place = into[span.place : span.place + span.numel]
            gradient = gradients.get(span.parameter)
            if gradient is None:
                place.zero_()
                continue
            values = gradient[span.begin : span.begin + span.numel]
            if factor == 1.0:
                place.copy_(values)
            elif values.dtype is place.dtype and values.device == place.device:
                torch.mul(values, factor, out=place)
            else:
                # Widen first: a product in a half type would be rounded.
                place.copy_(values).mul_(factor)

    def gathered(self, number: int) -> Gathered:
        """Returns how the parameters of unit `number` are gathered: each in its own dtype."""
        spans = self._units[number].spans
        return Gathered(
            num_bytes=[sum(map(self._bytes_of, of_rank)) for of_rank in spans],
            read=partial(self._read, spans[self._rank]),
            write=partial(self._write, spans),
        )

    def _bytes_of(self, span: Span) -> int:
        return span.numel * self._flats[span.parameter].element_size()

    def _bytes(self, span: Span) -> torch.Tensor:
        return self._flats[span.parameter][span.begin : span.begin + span.numel].view(torch.uint8)

    def _read(self, spans: Sequence[Span], out: torch.Tensor) -> None:
        for span, part in zip(spans, out.split([self._bytes_of(span) for span in spans]), strict=True):
            part.copy_(self._bytes(span))

    def _write(self, spans: Sequence[Sequence[Span]], owner: int, data: torch.Tensor) -> None:
        of_owner = spans[owner]
        sizes = [self._bytes_of(span) for span in of_owner]
        for span, part in zip(of_owner, data.split(sizes), strict=True):
            self._bytes(span).copy_(part)
