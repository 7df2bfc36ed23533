"""Measures, layer by layer, what a pipeline's stages hold between forward and backward, on this process's CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.data import Batch
from hpctrain.errors import UsageError
from hpctrain.run.memory.measuring.activations import LiveBytes, first_of, gradients_dropped
from hpctrain.run.memory.sizes import LayerActivations, line_through
from hpctrain.train import TaskRunner

# Makes the task's runner with another model.
RunnerOf = Callable[[nn.Module], TaskRunner]


@dataclass(slots=True, kw_only=True)
class _Bytes:
    """Of one layer: kept for backward, at most beyond that, and the output's."""

    kept: int
    more: int
    output: int


def measure_layers(
    runner_of: RunnerOf, layers: Sequence[nn.Module], batch: Batch, *, sizes: Sequence[int]
) -> LayerActivations:
    """Returns what the layers and the loss hold, from micro-batches of so many of the first samples of `batch`.

    The task's loss is to call its model once, with one tensor, from which the layers are called one after another.
    """
    measured = {samples: _measured(runner_of, layers, first_of(batch, samples)) for samples in sizes}
    found = [dict(zip(measured, of_layer, strict=True)) for of_layer in zip(*measured.values(), strict=True)]
    many = max(sizes)
    return LayerActivations(
        kept=tuple(line_through({n: layer.kept for n, layer in of.items()}) for of in found),
        more=tuple(line_through({n: layer.more for n, layer in of.items()}) for of in found),
        output_bytes=tuple(of[many].output / many for of in found),
    )


def _measured(runner_of: RunnerOf, layers: Sequence[nn.Module], batch: Batch) -> list[_Bytes]:
    chain = _OneByOne(layers)
    runner_of(chain).loss(batch)
    if chain.output is None:
        raise UsageError("the task's loss has not called its model, which a pipeline gives the batch")
    output = chain.output.requires_grad_(chain.output.is_floating_point())
    runner = runner_of(_Given(output))
    live = LiveBytes([output, *batch.fields.values()])
    with live:
        loss = runner.loss(batch)
        kept = live.now
        loss.backward()
    return [*chain.found, _Bytes(kept=kept, more=live.most - kept, output=0)]


class _Given(nn.Module):
    """Returns the same output for any input."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._output


class _OneByOne(nn.Module):
    """Measures forward and backward of one layer after another. output: of the last layer, cut off from its graph."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.found: list[_Bytes] = []
        self.output: torch.Tensor | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values.detach().requires_grad_(values.is_floating_point())
            live = LiveBytes([values, *layer.parameters(), *layer.buffers()])
            with gradients_dropped(layer), live:
                output = layer(values)
                kept = live.now
                if output.requires_grad:
                    output.backward(torch.ones_like(output))
            self.found.append(_Bytes(kept=kept, more=live.most - kept, output=output.nbytes))
            values = output
        self.output = values.detach()
        return self.output
