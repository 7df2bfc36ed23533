"""Measures what forward and backward of a micro-batch hold at once, on the CPU of this process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.data import Batch
from hpctrain.distributed import Checkpointing
from hpctrain.train import TaskRunner

# Twice as many samples take at most this times as much memory, with a margin.
_GROWTH = 2.5


class LiveBytes(TorchDispatchMode):
    """Counts, as a context manager, the memory of the tensors that operations make within it, until it is freed.

    Views share their memory, which counts once. known: tensors whose memory does not count. now: bytes that are alive;
    most: the most at any time.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.most = 0
        for tensor in known:
            self._count(tensor, counts=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return made

    def _count(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        if tensor.layout is not torch.strided:  # it has no memory of its own, but that of its parts
            return
        storage = tensor.untyped_storage()
        number = id(storage)
        if number in self._live:
            return
        num_bytes = storage.nbytes() if counts else 0
        self._live[number] = weakref.ref(storage, functools.partial(self._freed, number, num_bytes))
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def _freed(self, number: int, num_bytes: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._live[number]
        self.now -= num_bytes


def most_bytes(runner: TaskRunner, batch: Batch) -> int:
    """Returns the most bytes at once in forward and backward of `batch`, without parameters, buffers and the batch.

    A gradient counts until it is complete, since training moves it into a bucket then.
    """
    known = [*runner.model.parameters(), *runner.model.buffers(), *batch.fields.values()]
    live = LiveBytes(known)
    with gradients_dropped(runner.model), live:
        runner.loss(batch).backward()
    return live.most


@contextmanager
def gradients_dropped(model: torch.nn.Module) -> Iterator[None]:
    """Drops each parameter's gradient as soon as it is complete, within the `with` block."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure_activations(
    make_runner: Callable[[Checkpointing], TaskRunner],
    batch: Batch,
    *,
    ways: Iterable[Checkpointing],
    memory: int,
    sizes: Sequence[int] = (),
) -> dict[Checkpointing, dict[int, int]]:
    """Returns for each of the ways the bytes of two micro-batches, by their samples; of a batch of one sample, of one.

    The first samples of `batch` are taken. For the first way, unless `sizes` says how many: 2, then twice as many as
    before, while there are as many and the next ones are expected to take less than `memory` bytes; of these the two
    largest count, which are taken for the other ways too. make_runner: with a new model.
    """
    measured: dict[Checkpointing, dict[int, int]] = {}
    for way in ways:
        runner = make_runner(way)
        found: dict[int, int] = {}
        if sizes:
            measured[way] = {samples: most_bytes(runner, first_of(batch, samples)) for samples in sizes}
            continue
        samples = min(2, batch.num_samples)
        while samples <= batch.num_samples:
            found[samples] = most_bytes(runner, first_of(batch, samples))
            if _GROWTH * found[samples] > memory:
                break
            samples *= 2
        sizes = sorted(found)[-2:]
        measured[way] = {samples: found[samples] for samples in sizes}
    return measured


def first_of(batch: Batch, samples: int) -> Batch:
    """Returns the first samples of a batch."""
    fields = {name: tensor[:samples] for name, tensor in batch.fields.items()}
    return replace(batch, fields=fields, num_samples=samples, num_padded=0, indices=None)
