"""Completes the gradients of a model whose layers are split over tensor groups, by the sums that FSDP2 leaves out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
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
from hpctrain.errors import UsageError
from hpctrain.reduce.zero.bucket_division import BucketProgress

# A bucket is a 32nd of the gradients, within these bounds. The sum of the last one starts when backward has ended.
_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 1_000_000, 25_000_000
_PARTS = 32
_MOST_RUNNING = 2  # buckets that are being summed, and held twice


@final
class EarlySums:
    """Sums a model's gradients over `group`, bucket by bucket, while backward computes further gradients.

    The ranks sum the same buckets in the same order.

    parameters: parameters in the order in which their gradients are expected, the same on every rank.
    group: process group over which gradients are summed.
    is_ready: function of a parameter that returns True if its gradient can be summed in the form in which backward
    leaves it. If the function returns False, `finish` sums the bucket of this gradient, and all later buckets.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        group: Any,
        is_ready: Callable[[torch.Tensor], bool],
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._is_ready = is_ready
        total = sum(local_part(p).numel() * p.element_size() for p in self._parameters)
        num_bytes = min(max(total // _PARTS, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES)
        self._progress = BucketProgress(list(in_buckets(self._parameters, num_bytes=num_bytes)))
        self._running: deque[tuple[Sequence[int], torch.Tensor, Any]] = deque()
        self._watching = False
        self._reset()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    @property
    def had_last(self) -> bool:
        """True from the call of `during_backward` until `finish`: the last backward of the step has begun."""
        return self._had_last

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Context manager around the last backward of a step. Starts the sums of gradients that are complete.

        Every rank must enter the context the same number of times. Raises UsageError for another backward before
        `finish`.
        """
        self._check_last()
        self._watching = self._had_last = True
        try:
            yield
        finally:
            self._watching = False

    def finish(self) -> None:
        """Sums the remaining gradients, and waits for all sums. Collective over the group.

        A gradient that only other ranks have counts as zeros; a gradient that no rank has remains None.
        """
        self._progress.end_backward()
        self._begin_complete()
        while self._running:
            self._end_first()
        device = self._parameters[0].device
        used = torch.tensor(self._had, dtype=torch.int32, device=device)
        torch.distributed.all_reduce(used, group=self._group)
        for parameter, count in zip(self._parameters, used.tolist(), strict=True):
            if not count:
                parameter.grad = None
        self._reset()

    def forget(self) -> None:
        """Ends the sums of a step that is not applied. Collective after `during_backward`."""
        if self._had_last:
            self.finish()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ------------------------------------------------------------------ implementation

    def _reset(self) -> None:
        self._progress.begin_step()
        self._had_last = False
        self._had = [False] * len(self._parameters)

    def _check_last(self) -> None:
        if self._had_last:
            raise UsageError(
                "backward ran twice before step(): the first gradients are being summed already. Pass last=False to "
                "all but the last backward of a step"
            )

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_there(parameter: torch.Tensor) -> None:
            if not self._watching:
                self._check_last()
            elif self._is_ready(parameter) and self._progress.gradient_is_ready(index):
                self._begin_complete()

        return gradient_is_there

    def _begin_complete(self) -> None:
        for number in self._progress.take_complete():
            self._begin(self._progress.indices(number))

    @torch.no_grad()  # after create_graph=True gradients have a graph
    def _begin(self, bucket: Sequence[int]) -> None:
        while len(self._running) >= _MOST_RUNNING:
            self._end_first()
        parts = []
        for index in bucket:
            parameter = self._parameters[index]
            self._had[index] = parameter.grad is not None
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parts.append(local_part(parameter.grad).reshape(-1))
        flat = torch.cat(parts)
        work = torch.distributed.all_reduce(flat, group=self._group, async_op=True)
        self._running.append((bucket, flat, work))

    @torch.no_grad()
    def _end_first(self) -> None:
        bucket, flat, work = self._running.popleft()
        work.wait()
        gradients = [local_part(self._parameters[index].grad) for index in bucket]
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view(gradient.shape))


def in_buckets(tensors: Sequence[torch.Tensor], *, num_bytes: int) -> Iterator[list[int]]:
    """Yields lists of indices of tensors of the same dtype. The tensors of a list have at least `num_bytes` together.

    The last list of a dtype may have fewer bytes. For a DTensor, the size of this rank's part counts.
    """
    waiting: dict[torch.dtype, list[int]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for index, part in enumerate(map(local_part, tensors)):
        waiting[part.dtype].append(index)
        sizes[part.dtype] += part.numel() * part.element_size()
        if sizes[part.dtype] >= num_bytes:
            yield waiting.pop(part.dtype)
            del sizes[part.dtype]
    yield from waiting.values()


# Completes the gradients of a model whose layers are split over tensor groups.


_BUCKET_BYTES = 25_000_000


@final
class TensorGradients:
    """The gradients of `parameters`, which belong to a model that is split according to `split`.

    After backward, a rank has the gradients of its parts of split layers. For a layer that all ranks of the tensor
    group hold as a whole, a rank has the whole gradient. If each rank has computed the layer on a part of the sequence,
    a rank has only the contribution of its part to the gradient.
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
        """True while sums are in progress: from `during_backward`, if it starts sums, until `complete`."""
        return self._sums is not None and self._sums.had_last

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Context manager around the last backward of a step. Starts sums over the data-parallel ranks.

        Raises UsageError for another backward before `complete`.
        """
        if self._sums is None:
            yield
        else:
            with self._sums.during_backward():
                yield

    def forget(self) -> None:
        """Ends the sums of a step that is not applied. Collective after `during_backward`."""
        if self._sums is not None:
            self._sums.forget()

    def close(self) -> None:
        if self._sums is not None:
            self._sums.close()

    def complete(self) -> None:
        """Completes all gradients. Collective.

        The contributions of the parts of a sequence are summed over the tensor group. Gradients are summed over the
        data-parallel ranks, unless `during_backward` or FSDP2 has done so. Gradients of layers that all ranks of a
        tensor group hold as a whole are then averaged over the group: the ranks have computed the same gradients, but
        perhaps rounded differently, and their parameters would drift apart.
        """
        tensor = self._split.tensor_group()
        # The gradient of a layer on a part of the sequence is a DTensor with a partial placement; FSDP2 has summed it.
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
        """Returns True on exactly one of the ranks that hold this part of a gradient, which counts the part."""
        return is_first_replica(gradient) if is_sharded_tensor(gradient) else self._split.is_first


def _is_complete(parameter: Any) -> bool:
    """Returns False if the gradient must still be summed, or moved, within the tensor group."""
    return not is_sharded_tensor(parameter.grad) or parameter.grad.placements == parameter.placements


def _is_share(gradient: Any) -> bool:
    """Returns True if the gradient must still be summed over the tensor group: each rank holds one summand."""
    return is_sharded_tensor(gradient) and any(p.is_partial() for p in gradient.placements)


def _all_reduce(tensors: Sequence[torch.Tensor], *, group: Any, factor: float = 1.0) -> None:
    """Replaces each tensor by `factor` times its sum over the ranks of `group`, in buckets. Collective over the group.

    tensors: tensors with the same shapes and dtypes on every rank of the group.
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
