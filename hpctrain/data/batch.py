"""One rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hpctrain.data.order import Span, rank_share
from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's samples of one global batch.

    fields: name -> tensor of shape (num_samples, *sample_shape). num_samples may be 0: the last batch of an
    epoch can have fewer samples than there are ranks.
    start: position of the global batch in the epoch, in samples.
    global_samples: samples of all ranks in the global batch.

    A loss that is a mean over this rank's samples, times `weight`, summed over the ranks, is the mean over
    the global batch, whatever the split.
    """

    fields: dict[str, torch.Tensor]
    epoch: int
    start: int
    num_samples: int
    global_samples: int

    @property
    def stop(self) -> int:
        """Position in the epoch behind this global batch: where a run that stops here goes on."""
        return self.start + self.global_samples

    @property
    def weight(self) -> float:
        """This rank's share of the global batch, num_samples / global_samples."""
        return self.num_samples / self.global_samples

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.fields.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]

    def split(self, num_parts: int) -> list[Batch]:
        """Micro-batches, views of this batch; sizes differ by at most one, weights add up to `weight`.

        With fewer samples than parts some are empty, so that every rank has the same number of parts.
        """
        if num_parts < 1:
            raise UsageError(f"a batch was to be split into {num_parts} parts; at least 1 is possible")
        spans = [rank_share(0, self.num_samples, rank=part, num_ranks=num_parts) for part in range(num_parts)]
        return [self._part(span) for span in spans]

    def _part(self, span: Span) -> Batch:
        fields = {name: tensor[span.start : span.stop] for name, tensor in self.fields.items()}
        return replace(self, fields=fields, num_samples=span.num_samples)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The batch on `device`; copies from pinned memory overlap with computation there."""
        fields = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.fields.items()}
        return replace(self, fields=fields)
