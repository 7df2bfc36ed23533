"""Sums gradients over the ranks of a process group, bucket by bucket, while backward computes others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from hpctrain.distributed import local_part
from hpctrain.errors import UsageError
from hpctrain.reduce.sharded.bucket_progress import BucketProgress

# A bucket: a 32nd of the gradients, within these bounds. The last one's sum begins when backward has ended.
_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 1_000_000, 25_000_000
_PARTS = 32
_MOST_RUNNING = 2  # buckets that are being summed, and held twice


@final
class EarlySums:
    """The sums of one model's gradients over `group`. Ranks begin the same buckets in the same order.

    parameters: in the order in which their gradients are expected, the same on every rank. is_ready: whether a gradient
    can be summed as backward leaves it; those that cannot, and all that follow in this order, are summed by `finish`.
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
        """True from `during_backward` to `finish`."""
        return self._had_last

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Begins sums of gradients that are complete, in the last backward of a step. Raises UsageError for a backward
        after it, before `finish`; every rank calls it equally often."""
        self._check_last()
        self._watching = self._had_last = True
        try:
            yield
        finally:
            self._watching = False

    def finish(self) -> None:
        """Sums what was not yet, and waits for all. Collective over the group.

        A gradient that only other ranks have counts as zeros; one that no rank has stays None.
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
        """Ends sums of a step that is not made. Collective after `during_backward`."""
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
    """Yields the indices of the tensors, those of one dtype together, in lists of at least `num_bytes` but the last of
    a dtype. Of a DTensor this rank's part counts."""
    waiting: dict[torch.dtype, list[int]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for index, part in enumerate(map(local_part, tensors)):
        waiting[part.dtype].append(index)
        sizes[part.dtype] += part.numel() * part.element_size()
        if sizes[part.dtype] >= num_bytes:
            yield waiting.pop(part.dtype)
            del sizes[part.dtype]
    yield from waiting.values()
