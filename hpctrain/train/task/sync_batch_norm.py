"""Batch normalisation over the samples of all ranks.

A layer normalises with the mean and variance of the global batch, so that N ranks train as one rank would with all
samples. Parameters and buffers have torch's names, so that checkpoints can be loaded into the original model.

Formula for combining the ranks' variances: Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from hpctrain.comm import Collective
from hpctrain.distributed import is_sharded
from hpctrain.errors import UsageError


@final
class _Ranks:
    """Holds the communicator of the layers.

    A deep copy of the model has the same communicator, since a communicator cannot be copied.
    """

    def __init__(self, comm: Collective) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ranks:
        return self


@final
class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d` to `3d` over the ranks of a communicator. `convert_sync_batch_norm` creates it.

    Input: shape (n, channels, ...), where n may differ between ranks and may be 0. In training, forward and backward
    are collective: every rank must call them the same number of times, a rank without samples with an empty batch.
    Evaluation does not communicate: a layer without running statistics then normalises each rank's batch separately.
    Running statistics are bit-identical on every rank.
    """

    def __init__(self, like: _BatchNorm, *, ranks: _Ranks) -> None:
        """Creates the layer with the parameters and buffers of `like`: the same tensors, not copies."""
        super().__init__(like.num_features, like.eps, like.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats = like.affine, like.track_running_stats
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(like, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(like, name))
        self.train(like.training)
        self._ranks = ranks

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"batch normalisation over the ranks was called with shape {tuple(input.shape)}: it needs (samples, "
                f"{self.num_features}, ...)"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        comm = self._ranks.comm
        if comm.num_ranks == 1 or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        with torch.no_grad():
            count, mean, variance = global_statistics(input.detach(), comm=comm)
            if count == 1:
                raise UsageError(
                    "batch normalisation has only one value per channel over all ranks: it needs a larger "
                    "data.global_batch",
                    agreed=True,
                )
            self._track(count, mean, variance)
        mean, variance = mean.to(_sum_dtype(input)), variance.to(_sum_dtype(input))
        inverse = torch.rsqrt(variance + self.eps)
        return _Normalize.apply(input, self.weight, self.bias, mean, inverse, count, comm)

    def _track(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Updates the running statistics as torch does, with the unbiased variance.

        `mean` and `variance`: shape (channels,).
        """
        if self.running_mean is None or self.running_var is None or count == 0:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if share is None else share
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share or 0.0)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share or 0.0)


def _sum_dtype(values: torch.Tensor) -> torch.dtype:
    """Returns the dtype for sums of `values`: float64 for float64, otherwise float32.

    Half-precision types would lose bits in additions.
    """
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def _over_samples(values: torch.Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshapes `values`, shape (channels,), so that it broadcasts over `like`, shape (n, channels, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def global_statistics(values: torch.Tensor, *, comm: Collective) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Returns the number of values per channel over all ranks, and their mean and biased variance. Collective.

    Mean and variance are float64 of shape (channels,), 0 if there are no values. The ranks' parts are combined in rank
    order, so that the result is bit-identical on every rank.

    values: floating point, shape (n, channels, ...).
    """
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    message = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    if count:
        wide = values.to(_sum_dtype(values))
        variance, mean = torch.var_mean(wide, dim=_over_samples(wide), correction=0)
        message[0] = count
        message[1 : 1 + channels] = mean
        message[1 + channels :] = variance.double() * count
    whole = comm.all_gather(message, counts=[message.numel()] * comm.num_ranks)
    parts = whole.view(comm.num_ranks, -1)
    total, mean, squares = 0.0, torch.zeros_like(message[1 : 1 + channels]), None
    for part, number in zip(parts, parts[:, 0].tolist(), strict=True):
        if number == 0:
            continue
        theirs, their_squares = part[1 : 1 + channels], part[1 + channels :]
        distance = theirs - mean
        joined = total + number
        between = distance.square() * (total * number / joined)
        squares = their_squares + between if squares is None else squares + their_squares + between
        mean = mean + distance * (number / joined)
        total = joined
    variance = torch.zeros_like(mean) if squares is None else squares / total
    return int(total), mean, variance


@final
class _Normalize(torch.autograd.Function):
    """Computes (x - mean) * inverse * weight + bias, where mean and inverse depend on the inputs x of all ranks.

    Backward is collective over `comm`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: int,
        comm: Collective,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, weight, mean, inverse)
        ctx.count, ctx.comm = count, comm
        out = (values - _per_channel(mean, values)) * _per_channel(inverse, values)
        if weight is not None:
            out = out * _per_channel(weight, values)
        if bias is not None:
            out = out + _per_channel(bias, values)
        return out.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, inverse = ctx.saved_tensors
        dims = _over_samples(values)
        wide = gradient.to(mean.dtype)
        normal = (values - _per_channel(mean, values)) * _per_channel(inverse, values)
        # Sums of this rank, shape (2, channels); 0 without samples.
        sums = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        of_weight = sums[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = sums[0] if ctx.needs_input_grad[2] else None
        if of_bias is not None and weight is not None:
            of_bias = of_bias.to(weight.dtype)
        of_values = None
        if ctx.needs_input_grad[0]:  # on all ranks or on none
            # Every rank's outputs depend on this rank's inputs, through mean and variance.
            flat = sums.view(-1).clone()  # the weight's gradient stays this rank's: the updater sums it
            ctx.comm.all_reduce(flat)
            means = flat.view(2, -1) / max(1, ctx.count)
            of_values = wide - _per_channel(means[0], values) - normal * _per_channel(means[1], values)
            scale = inverse if weight is None else inverse * weight
            of_values = (of_values * _per_channel(scale, values)).to(values.dtype)
        return of_values, of_weight, of_bias, None, None, None, None


def convert_sync_batch_norm(model: torch.nn.Module, comm: Collective) -> torch.nn.Module:
    """Replaces every batch normalisation layer in `model` by a layer over the ranks of `comm`. Not collective.

    Layers are replaced in place and keep their parameters, buffers and names. Returns `model`, or a new layer if
    `model` itself is a batch normalisation layer. Raises UsageError for a lazy layer that is not initialised.

    comm: a communicator that nothing else uses; the threads that run forward and backward use it.
    """
    return _converted(model, ranks=_Ranks(comm), done={})


def _converted(
    module: torch.nn.Module, *, ranks: _Ranks, done: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    if id(module) in done:
        return done[id(module)]
    if isinstance(module, _LazyNormBase):
        raise UsageError(
            f"{type(module).__name__} has no number of channels yet: run forward once before the conversion to batch "
            "normalisation over the ranks, or give num_features"
        )
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        done[id(module)] = SyncBatchNorm(module, ranks=ranks)
        return done[id(module)]
    done[id(module)] = module
    for name, child in list(module._modules.items()):  # named_children leaves out a child's second name
        if child is None:
            continue
        replacement = _converted(child, ranks=ranks, done=done)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


def communicates_in_forward(model: torch.nn.Module) -> bool:
    """Returns True if forward and backward of the model are collective: a rank without samples must run them too."""
    return is_sharded(model) or any(isinstance(module, SyncBatchNorm) for module in model.modules())
