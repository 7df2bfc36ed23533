"""Completes the gradients of a model whose layers are split over tensor groups: sums that FSDP2 does not make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from hpctrain.distributed import (
    TensorSplit,
    is_first_replica,
    is_sharded_tensor,
    local_part,
    replicated_over_tensor_ranks,
    sharded_as,
)

_BUCKET_BYTES = 25_000_000


@final
class TensorGradients:
    """The gradients of `parameters`, those of a model that is split as `split` says.

    A rank has the gradients of its parts of split layers, and of what the tensor group holds alike the whole gradients
    or, if it was computed on a part of the sequence, that part's share.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, split: TensorSplit) -> None:
        self._parameters = list(parameters)
        self._split = split

    def complete(self) -> None:
        """Sums shares of parts of the sequence over the tensor group, and all over the data-parallel ranks, unless
        FSDP2 has. Collective.

        What a tensor group holds alike is then averaged over the group. Its ranks have computed the same numbers, but
        perhaps not the same bits, and would drift apart.
        """
        data, tensor = self._split.data_group(), self._split.tensor_group()
        # A layer on a part of the sequence has a DTensor gradient whose placement says so, with FSDP2 already a sum.
        shares = [p for p in self._parameters if _is_share(p.grad)]
        _all_reduce([local_part(p.grad) for p in shares], group=tensor)
        for parameter in shares:
            parameter.grad = sharded_as(local_part(parameter.grad), like=parameter)
        for parameter in self._parameters:
            grad: Any = parameter.grad
            if is_sharded_tensor(grad) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        if data is not None:
            self._fill_absent(data)
            _all_reduce([local_part(p.grad) for p in self._parameters if p.grad is not None], group=data)
        alike = [p.grad for p in self._parameters if p.grad is not None and replicated_over_tensor_ranks(p)]
        # Divided before: the sum of several ranks' gradients may overflow where one does not.
        _all_reduce([local_part(g) for g in alike], group=tensor, factor=1.0 / self._split.num_tensor_ranks)

    def counts(self, gradient: torch.Tensor) -> bool:
        """Returns True on one of the ranks that hold this part of a gradient: exactly one rank for each element."""
        return is_first_replica(gradient) if is_sharded_tensor(gradient) else self._split.is_first

    def _fill_absent(self, group: Any) -> None:
        """Makes zeros of a gradient that another rank has and this one does not, as without samples. Collective."""
        from torch.distributed import all_reduce

        device = self._parameters[0].device
        used = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.int32, device=device)
        all_reduce(used, group=group)
        for parameter, count in zip(self._parameters, used.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _is_share(gradient: Any) -> bool:
    """Returns True if the ranks of the tensor group have parts of the sum that is the gradient of each of them."""
    return is_sharded_tensor(gradient) and any(p.is_partial() for p in gradient.placements)


def _all_reduce(tensors: Sequence[torch.Tensor], *, group: Any, factor: float = 1.0) -> None:
    """Replaces each tensor by `factor` times its sum over the ranks of `group`, in buckets. Collective over the group.

    tensors: of the same shapes and dtypes on every rank of the group.
    """
    from torch.distributed import all_reduce

    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        if factor != 1.0:
            flat.mul_(factor)
        all_reduce(flat, group=group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors, those of one dtype together, in lists of at least `_BUCKET_BYTES` but the last of a dtype."""
    waiting: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        bucket = waiting[tensor.dtype]
        bucket.append(tensor)
        if sum(t.numel() * t.element_size() for t in bucket) >= _BUCKET_BYTES:
            yield waiting.pop(tensor.dtype)
    yield from waiting.values()
