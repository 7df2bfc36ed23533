"""Reduces the gradients of DistributedOptimizer in buckets, while backward runs.

Buckets are formed once, in reverse order of the parameters, and started in that order on every rank. A bucket starts
when all of its gradients are computed and all buckets before it have been started. Source: Li et al. 2020,
arXiv:2006.15704.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from hpctrain.distributed import CollectiveWork
from hpctrain.errors import GradientsInUse, UsageError
from hpctrain.hvd.asynchronous import described, reduce_scaled, sparse_sum, start_all_reduce
from hpctrain.hvd.errors import HorovodValueError, as_horovod_error
from hpctrain.hvd.group import Group, dtype_name_of, reduction_of_zeros
from hpctrain.hvd.reductions import (
    JOINABLE,
    Average,
    Compressor,
    FP16Compressor,
    HorovodOp,
    NoneCompressor,
    Sum,
)
from hpctrain.reduce import GradientSpec, PendingGradient, plan_buckets
from hpctrain.storage import split_evenly

BUCKET_BYTES = 8 << 20
Named = tuple[str, torch.Tensor]

_IN_USE = (
    "gradients were read or changed between backward and step(): they are being reduced over the ranks, and a change "
    "would be lost. Call optimizer.synchronize() on every rank after backward, read or change them, and then step in "
    "`with optimizer.skip_synchronize():`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How gradients are reduced.

    Attributes:
        op: The operation that combines the ranks' gradients.
        compression: The format in which gradients are sent.
        passes: The number of backward passes per step.
        prescale: The factor by which gradients are multiplied before the reduction.
        postscale: The factor by which gradients are multiplied after the reduction.
        groups: Lists of parameters that are reduced together, or the number of groups to form. None: buckets of
            `BUCKET_BYTES`.
        sparse_as_dense: Whether sparse gradients are reduced as dense tensors.
    """

    op: HorovodOp = Average
    compression: Compressor = NoneCompressor
    passes: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None
    sparse_as_dense: bool = False


class _Bucket:
    """The gradients that are reduced together.

    `parameters` are the indices of their parameters. `missing` is the number of gradients that are not computed yet.
    """

    def __init__(self, parameters: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self.missing = len(parameters)
        self.dense: list[int] | None = None  # parameters in `flat`; None: not created yet
        self.flat = torch.empty(0)
        self.views: list[torch.Tensor] = []
        self.works: list[CollectiveWork] = []
        self.finish: Callable[[], None] = lambda: None


@final
class GradientReduction:
    """Reduces the gradients of some parameters. Create a new object when parameters are added.

    named: the parameters, as pairs (name, parameter).
    group: function that returns the group to reduce over. It is called for each bucket, since `elastic.run` replaces
    the groups.

    If several objects have a parameter in common, only the newest starts reductions in backward.
    """

    def __init__(self, named: Sequence[Named], *, group: Callable[[], Group], settings: Settings) -> None:
        self._group = group
        self._settings = settings
        self._names = [name for name, parameter in named if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._half = settings.compression is FP16Compressor
        self._plain = self._half or settings.compression is NoneCompressor
        self._buckets = [_Bucket(numbers) for numbers in self._plan()]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.parameters}
        self._passes = settings.passes
        self._left = [settings.passes] * len(self._parameters)
        self._next = 0  # the bucket to start next
        self._sparse_dims: dict[int, int] = {}  # by parameter that had a sparse gradient
        # Gradients from backward to `finish`, in which `.grad` refuses every use.
        self._held: dict[int, torch.Tensor] = {}
        self._pending = self._made_pending()
        self.begun = False  # whether a gradient has come since the last `finish`
        known = {id(parameter) for parameter in self._parameters}
        for other in list(_watching):
            if not known.isdisjoint(map(id, other._parameters)):
                other.close()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))
            for number, parameter in enumerate(self._parameters)
        ]
        _watching.add(self)

    def finish(self) -> None:
        """Starts the remaining buckets, with zeros for missing gradients, and waits for all buckets. Collective."""
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    f"{name!r} did not require a gradient when DistributedOptimizer was made, but has one now: make "
                    "the optimizer after changing requires_grad"
                )
        try:
            while self._next < len(self._buckets):
                self._start_next()
            with as_horovod_error():
                for bucket in self._buckets:
                    for work in bucket.works:
                        work.wait()
                    self._give_back(bucket.parameters)
                    bucket.finish()
        finally:
            self.reset()

    def reset(self) -> None:
        """Prepares for the first gradient of the next step."""
        self._release()
        for bucket in self._buckets:
            bucket.works, bucket.missing = [], len(bucket.parameters)
        self._left = [self._passes] * len(self._parameters)
        self._next, self.begun = 0, False

    def set_passes(self, passes: int) -> None:
        """Changes the number of backward passes per step. Call it between two steps."""
        self._release()
        self._passes = passes
        self._pending = self._made_pending()
        self.reset()

    def close(self) -> None:
        """Stops reducing in backward. `finish` can still be called, and then reduces all gradients."""
        for hook in self._hooks:
            hook.remove()
        _watching.discard(self)
        self._release()

    def gradient_is_there(self, number: int) -> None:
        """Counts a gradient of the parameter with index `number`, and starts the buckets that are complete."""
        self.begun = True
        self._left[number] -= 1
        if self._left[number] < 0:
            raise UsageError(self._too_often(number))
        if self._left[number] == 0:
            self._hold([number])
            self._bucket_of[number].missing -= 1
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start_next()

    # ------------------------------------------------------------------ one bucket

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._give_back(bucket.parameters)
        gradients = {number: self._gradient(number) for number in bucket.parameters}
        sparse = [number for number, gradient in gradients.items() if gradient.is_sparse]
        self._sparse_dims.update({number: gradients[number].sparse_dim() for number in sparse})
        if self._settings.sparse_as_dense:
            for number in sparse:
                gradients[number] = gradients[number].to_dense()
        apart = [] if self._settings.sparse_as_dense else sparse
        if self._plain:
            self._start_plain(bucket, gradients, apart=apart)
        else:
            self._start_compressed(bucket, gradients, apart=apart)
        in_bucket = bucket.finish

        def finish() -> None:
            in_bucket()
            for number in sparse if self._settings.sparse_as_dense else ():
                self._parameters[number].grad = gradients[number].to_sparse(self._sparse_dims[number])

        bucket.finish = finish
        self._hold(bucket.parameters)

    def _hold(self, numbers: Sequence[int]) -> None:
        """Stores the gradients of the parameters with indices `numbers`, until `_give_back`.

        Meanwhile `.grad` contains an object that refuses every use.
        """
        for number in numbers:
            gradient = self._parameters[number].grad
            if gradient is not None:
                self._held[number] = gradient
                self._parameters[number].grad = self._pending[number]

    def _give_back(self, numbers: Sequence[int]) -> None:
        """Puts the gradients that `_hold` has stored back into `.grad`.

        numbers: indices of the parameters.

        Raises GradientsInUse if the script has set other gradients.
        """
        for number in numbers:
            if number in self._held:
                if self._parameters[number].grad is not self._pending[number]:
                    raise GradientsInUse(_IN_USE)
                self._parameters[number].grad = self._held.pop(number)

    def _release(self) -> None:
        """Puts gradients that `_hold` has stored back into `.grad`, except where the script has set other gradients."""
        for number, gradient in self._held.items():
            if self._parameters[number].grad is self._pending[number]:
                self._parameters[number].grad = gradient
        self._held.clear()

    def _made_pending(self) -> list[PendingGradient]:
        return [
            PendingGradient(parameter, words=_IN_USE, twice=self._too_often(number))
            for number, parameter in enumerate(self._parameters)
        ]

    def _too_often(self, number: int) -> str:
        return (
            f"the gradient of {self._names[number]!r} was computed more often than "
            f"backward_passes_per_step={self._passes} before step() or synchronize()"
        )

    def _start_plain(
        self, bucket: _Bucket, gradients: dict[int, torch.Tensor], *, apart: Sequence[int]
    ) -> None:
        """Starts reducing copies of the gradients in the bucket's buffer.

        The sparse gradients, whose indices are in `apart`, are reduced one by one.
        """
        settings, group = self._settings, self._group()
        dense = [number for number in bucket.parameters if number not in apart]
        if dense != bucket.dense:
            self._lay_out(bucket, dense)
        own = [gradients[number] for number in dense]
        sizes = [gradient.numel() for gradient in own]
        found: dict[int, torch.Tensor] = {}

        def reduce() -> None:
            for view, gradient in zip(bucket.views, own, strict=True):
                view.copy_(gradient)
            if dense:
                reduce_scaled(
                    group, bucket.flat, op=settings.op, sizes=sizes, prescale=settings.prescale,
                    postscale=settings.postscale,
                )  # fmt: skip
            for view, gradient in zip(bucket.views, own, strict=True):
                gradient.copy_(view)
            for number in apart:
                found[number] = sparse_sum(group, gradients[number], op=settings.op)

        def finish() -> None:
            for number, gradient in found.items():
                self._parameters[number].grad = gradient

        zeros = None
        if settings.op in JOINABLE and not apart:
            zeros = reduction_of_zeros(settings.op, [(dtype_name_of(bucket.flat), sizes)])
        bucket.works = [group.run(self._what(bucket, apart), reduce, behind=True, zeros=zeros)]
        bucket.finish = finish

    def _start_compressed(
        self, bucket: _Bucket, gradients: dict[int, torch.Tensor], *, apart: Sequence[int]
    ) -> None:
        """Starts reducing the gradients in the form in which the user's compression has encoded them.

        The sparse gradients, whose indices are in `apart`, are not compressed.
        """
        settings, group = self._settings, self._group()
        dense = [number for number in bucket.parameters if number not in apart]
        sent = {number: settings.compression.compress(gradients[number]) for number in dense}
        found: dict[int, torch.Tensor] = {}
        if apart:

            def reduce() -> None:
                for number in apart:
                    found[number] = sparse_sum(group, gradients[number], op=settings.op)

            bucket.works.append(group.run(self._what(bucket, apart), reduce, behind=True))
        tensors = [compressed.detach() for compressed, _ in sent.values()]
        work = start_all_reduce(
            group, tensors, name=self._what(bucket, apart), op=settings.op, prescale=settings.prescale,
            postscale=settings.postscale,
        )  # fmt: skip
        bucket.works.append(work)

        def finish() -> None:
            for (number, (_, context)), tensor in zip(sent.items(), tensors, strict=True):
                gradients[number].copy_(settings.compression.decompress(tensor, context))
            for number, gradient in found.items():
                self._parameters[number].grad = gradient

        bucket.finish = finish

    def _gradient(self, number: int) -> torch.Tensor:
        """Returns the gradient of a parameter.

        A missing gradient becomes zeros, which are sparse if earlier gradients of the parameter were sparse.
        """
        parameter = self._parameters[number]
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            dims = self._sparse_dims.get(number)
            parameter.grad = zeros if dims is None else zeros.to_sparse(dims)
        gradient = parameter.grad
        if gradient.is_sparse and self._settings.op not in (Sum, Average):
            raise HorovodValueError(
                f"the gradient of {self._names[number]!r} is sparse, and cannot be reduced by {self._settings.op}: use "
                "hvd.Sum or hvd.Average"
            )
        # The compressions of hpctrain find a parameter by its gradient.
        return gradient.detach() if gradient.requires_grad else gradient

    def _lay_out(self, bucket: _Bucket, dense: list[int]) -> None:
        """Creates the bucket's buffer, and one view of it per parameter of `dense` (indices), in its shape."""
        likes = [self._parameters[number] for number in dense]
        sizes = [like.numel() for like in likes]
        bucket.dense = dense
        dtype = self._wire_dtype(likes[0]) if likes else torch.float32
        device = likes[0].device if likes else None
        bucket.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        bucket.views = [
            part.view(like.shape) for part, like in zip(bucket.flat.split(sizes), likes, strict=True)
        ]

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float16 if self._half and parameter.dtype.is_floating_point else parameter.dtype

    def _what(self, bucket: _Bucket, apart: Sequence[int]) -> str:
        first, last = bucket.parameters[0], bucket.parameters[-1]
        settings, count = (
            self._settings,
            sum(self._parameters[number].numel() for number in bucket.parameters),
        )
        wire = str(self._wire_dtype(self._parameters[first])).removeprefix("torch.")
        names = repr(self._names[first]) + (f" to {self._names[last]!r}" if last != first else "")
        sparse = f", sparse: {[self._names[number] for number in apart]}" if apart else ""
        how = described(settings.op, settings.prescale, settings.postscale)
        return f"gradients of {names}: {len(bucket.parameters)} of {count} elements as {wire}, {how}{sparse}"

    # ------------------------------------------------------------------ which parameters are reduced together

    def _plan(self) -> list[list[int]]:
        """Returns the indices of the parameters of each bucket, in the order in which the buckets start."""
        numbers = list(range(len(self._parameters)))
        explicit = self._explicit_groups(numbers)
        grouped = {number for members in explicit for number in members}
        rest = [number for number in numbers if number not in grouped]
        buckets = [part for members in explicit for part in self._divided(members, 1 << 62)]
        buckets += self._divided(rest, BUCKET_BYTES)
        # Backward reaches last the parameters that forward used first.
        return sorted(buckets, key=min, reverse=True)

    def _explicit_groups(self, numbers: Sequence[int]) -> list[list[int]]:
        groups = self._settings.groups
        if groups is None:
            return []
        if isinstance(groups, int):
            ends = iter(numbers)
            return [
                [next(ends) for _ in range(length)]
                for length in split_evenly(len(numbers), num_parts=groups)
                if length
            ]
        number_of = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        found = [[number_of[id(p)] for p in members if id(p) in number_of] for members in groups]
        return [members for members in found if members]

    def _divided(self, numbers: Sequence[int], bucket_bytes: int) -> Iterable[list[int]]:
        """Divides parameters into buckets of at most `bucket_bytes`, each with parameters of one dtype and device.

        numbers: indices of the parameters.

        Yields the indices of the parameters in each bucket.
        """
        for device in dict.fromkeys(self._parameters[number].device for number in numbers):
            here = [number for number in numbers if self._parameters[number].device == device]
            specs = [
                GradientSpec(self._parameters[n].numel(), self._wire_dtype(self._parameters[n])) for n in here
            ]
            for bucket in plan_buckets(specs, bucket_bytes=bucket_bytes):
                yield [here[slot.parameter] for slot in bucket.slots]


# The reductions that start in backward.
_watching: weakref.WeakSet[GradientReduction] = weakref.WeakSet()


def _hook(reduction: weakref.ref[GradientReduction], number: int) -> Callable[[torch.Tensor], None]:
    """Returns a gradient hook. It does not keep the reduction alive after the optimizer has been deleted."""

    def gradient_is_there(_: torch.Tensor) -> None:
        found = reduction()
        if found is not None:
            found.gradient_is_there(number)

    return gradient_is_there


def reduce_deltas(
    named: Sequence[Named], deltas: Sequence[torch.Tensor], *, group: Group, compression: Any, op: HorovodOp
) -> list[torch.Tensor]:
    """Returns the changes `deltas`, one tensor per parameter, reduced over the ranks. Collective."""
    sent = [compression.compress(delta) for delta in deltas]
    tensors = [tensor for tensor, _ in sent]
    name = f"changes of {len(named)} parameters"
    with as_horovod_error():
        start_all_reduce(group, tensors, name=name, op=op).wait()
    return [
        compression.decompress(tensor, context) for tensor, (_, context) in zip(tensors, sent, strict=True)
    ]
