"""Completes the gradients of a model whose layers are split over tensor groups: sums that FSDP2 does not make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from hpctrain.reduce.split_models.early_sums import EarlySums, in_buckets

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
        self._sums: EarlySums | None = None
        data = split.data_group()
        if data is not None:
            # Those of split layers first: what a layer on a part of the sequence leaves has to wait for `complete`.
            last_first = self._parameters[::-1]
            ordered = sorted(last_first, key=replicated_over_tensor_ranks)
            self._sums = EarlySums(ordered, group=data, is_ready=_is_complete)

    @property
    def has_begun(self) -> bool:
        """True from `during_backward` on if it begins sums, until they are complete."""
        return self._sums is not None and self._sums.had_last

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Begins sums over the data-parallel ranks within the last backward of a step.

        Raises UsageError for another one before `complete`.
        """
        if self._sums is None:
            yield
        else:
            with self._sums.during_backward():
                yield

    def forget(self) -> None:
        """Ends sums of a step that is not made. Collective after `during_backward`."""
        if self._sums is not None:
            self._sums.forget()

    def close(self) -> None:
        if self._sums is not None:
            self._sums.close()

    def complete(self) -> None:
        """Sums shares of parts of the sequence over the tensor group, and over the data-parallel ranks what
        `during_backward` has not, unless FSDP2 has. Collective.

        What a tensor group holds alike is then averaged over the group. Its ranks have computed the same numbers, but
        perhaps not the same bits, and would drift apart.
        """
        tensor = self._split.tensor_group()
        # A layer on a part of the sequence has a DTensor gradient whose placement says so, with FSDP2 already a sum.
        shares = [p for p in self._parameters if _is_share(p.grad)]
        _all_reduce([local_part(p.grad) for p in shares], group=tensor)
        for parameter in shares:
            parameter.grad = sharded_as(local_part(parameter.grad), like=parameter)
        for parameter in self._parameters:
            grad: Any = parameter.grad
            if not _is_complete(parameter):
                parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        if self._sums is not None:
            self._sums.finish()
        alike = [p.grad for p in self._parameters if p.grad is not None and replicated_over_tensor_ranks(p)]
        # Divided before: the sum of several ranks' gradients may overflow where one does not.
        _all_reduce([local_part(g) for g in alike], group=tensor, factor=1.0 / self._split.num_tensor_ranks)

    def counts(self, gradient: torch.Tensor) -> bool:
        """Returns True on one of the ranks that hold this part of a gradient: exactly one rank for each element."""
        return is_first_replica(gradient) if is_sharded_tensor(gradient) else self._split.is_first


def _is_complete(parameter: Any) -> bool:
    """Returns False if the gradient is still to be summed, or moved, within the tensor group."""
    return not is_sharded_tensor(parameter.grad) or parameter.grad.placements == parameter.placements


def _is_share(gradient: Any) -> bool:
    """Returns True if the ranks of the tensor group have parts of the sum that is the gradient of each of them."""
    return is_sharded_tensor(gradient) and any(p.is_partial() for p in gradient.placements)


def _all_reduce(tensors: Sequence[torch.Tensor], *, group: Any, factor: float = 1.0) -> None:
    """Replaces each tensor by `factor` times its sum over the ranks of `group`, in buckets. Collective over the group.

    tensors: of the same shapes and dtypes on every rank of the group.
    """
    from torch.distributed import all_reduce

    for indices in in_buckets(tensors, num_bytes=_BUCKET_BYTES):
        bucket = [tensors[index] for index in indices]
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        if factor != 1.0:
            flat.mul_(factor)
        all_reduce(flat, group=group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))
