"""One rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hpctrain.data.order.epoch_order import Span, rank_share
from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's samples of one global batch.

    fields: name -> tensor of shape (num_samples + num_padded, *sample_shape).
    num_samples: may be 0, the last batch of an epoch can have fewer samples than there are ranks.
    num_padded: samples behind them that only fill the tensors (`LastBatch.PAD`); they repeat others, and must
    not count: `real()` is the batch without them, `valid` tells them apart.
    start: position of the global batch in the epoch, in samples.
    global_samples: samples of all ranks in the global batch, those that only fill it not counted.
    num_skipped: samples of this rank that are left out, since they lie in damaged blocks (`OnDamage.SKIP`).
    global_skipped: the same over all ranks; 0 until the ranks have told each other (`hpctrain.train.agreed_batches`).

    A loss that is a mean over this rank's num_samples, times `weight`, summed over the ranks, is the mean over
    the global batch, whatever the split.
    """

    fields: dict[str, torch.Tensor]
    epoch: int
    start: int
    num_samples: int
    global_samples: int
    num_padded: int = 0
    num_skipped: int = 0
    global_skipped: int = 0

    @property
    def stop(self) -> int:
        """Position in the epoch behind this global batch: where a run that stops here goes on."""
        return self.start + self.global_samples

    @property
    def weight(self) -> float:
        """This rank's share of what is left of the global batch, num_samples / (global_samples - global_skipped)."""
        return self.num_samples / max(1, self.global_samples - self.global_skipped)

    @property
    def valid(self) -> torch.Tensor:
        """Which of the tensors' rows are samples that count: bool, shape (num_samples + num_padded,)."""
        device = next((tensor.device for tensor in self.fields.values()), None)
        return torch.arange(self.num_samples + self.num_padded, device=device) < self.num_samples

    def real(self) -> Batch:
        """The batch without the samples that only fill it: views of this one's tensors."""
        if not self.num_padded:
            return self
        fields = {name: tensor[: self.num_samples] for name, tensor in self.fields.items()}
        return replace(self, fields=fields, num_padded=0)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.fields.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]

    def split(self, num_parts: int) -> list[Batch]:
        """Micro-batches, views of this batch; sizes differ by at most one, weights add up to `weight`.

        With fewer samples than parts some are empty, so that every rank has the same number of parts. Of a
        filled batch the tensors' rows are split: the last parts may hold nothing that counts.
        """
        if num_parts < 1:
            raise UsageError(f"a batch was to be split into {num_parts} parts; at least 1 is possible")
        rows = self.num_samples + self.num_padded
        spans = [rank_share(0, rows, rank=part, num_ranks=num_parts) for part in range(num_parts)]
        return [self._part(span) for span in spans]

    def _part(self, span: Span) -> Batch:
        fields = {name: tensor[span.start : span.stop] for name, tensor in self.fields.items()}
        real = max(0, min(span.stop, self.num_samples) - span.start)
        return replace(self, fields=fields, num_samples=real, num_padded=span.num_samples - real)

    def to(
        self, device: torch.device | str, *, dtype: torch.dtype | None = None, non_blocking: bool = True
    ) -> Batch:
        """The batch on `device`; copies from pinned memory overlap with computation there.

        dtype: of all floating-point fields on `device`, as the model needs it; None: as they are. Integer and bool
        fields keep theirs.
        """
        fields = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.fields.items()}
        if dtype is not None:
            # After the copy: a copy that converts does so on the CPU, in memory that is not pinned.
            fields = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in fields.items()
            }
        return replace(self, fields=fields)
