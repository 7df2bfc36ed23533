"""Sequence parallelism: between split layers each rank of a tensor group computes a part of the sequence.

Features have the sequence along the last dimension but one, shape (..., sequence, width), indices of an embedding along
the last. Source: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@final
class SequenceParts:
    """Makes parts of whole sequences and whole sequences of parts, also in backward. All ranks have equally long parts.

    mesh: the ranks of a tensor group, its one axis. Methods that are collective are so in forward and in backward.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._num_parts, self._index = mesh.size(), mesh.get_local_rank()

    def check(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns the indices, shape (..., sequence). Raises UsageError if the sequence has no equal parts."""
        length = indices.shape[-1]
        if length % self._num_parts:
            raise UsageError(
                f"sequence = true with tensor = {self._num_parts}: a sequence of {length} places cannot be split into "
                f"{self._num_parts} equal parts. Use sequences of {length - length % self._num_parts} places, or leave "
                "sequence out"
            )
        return indices

    def part(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of indices, shape (..., sequence), or raises UsageError. Not collective."""
        return self.check(indices).chunk(self._num_parts, dim=-1)[self._index].contiguous()

    def as_input(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole of features, for a layer of which this rank computes some outputs. Collective.

        Each rank's gradient is its outputs' share; the sum over the ranks is split again.
        """
        from torch.distributed.tensor import Partial

        return self._gathered(part).to_local(grad_placements=(Partial(),))

    def sharing_gradient(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns as a DTensor what `as_input` returned; its gradient is left for that to sum. Not collective."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        return DTensor.from_local(rows, self._mesh, (Replicate(),), grad_placements=(Partial(),))

    def as_output(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole of features, with which every rank computes the same. Collective in forward only."""
        return self._gathered(part).to_local()

    def summed(self, features: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the sum of all ranks' features. Collective."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        whole = DTensor.from_local(features, self._mesh, (Partial(),))
        return whole.redistribute(placements=(Shard(features.dim() - 2),)).to_local()

    def drop_as_whole(self, module: nn.Dropout) -> None:
        """Makes the module draw numbers for whole sequences, the same on all ranks of the group, and use its part's.

        Generators of the ranks are in the same state and stay so, and the result is that of one rank.
        """
        module.forward = functools.partial(self._dropped, module, module.forward)  # type: ignore[method-assign]

    def _dropped(
        self, module: nn.Dropout, forward: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor
    ) -> torch.Tensor:
        if not module.training:
            return forward(part)
        *others, places, width = part.shape
        factors = forward(part.new_ones(*others, places * self._num_parts, width))
        # Copied: backward would keep the factors of the whole sequence.
        return part * factors.chunk(self._num_parts, dim=-2)[self._index].clone()

    def _gathered(self, part: torch.Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        features = DTensor.from_local(part, self._mesh, (Shard(part.dim() - 2),))
        return features.redistribute(placements=(Replicate(),))
