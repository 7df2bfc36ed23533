"""One rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import Span, rank_share
from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's samples of one global batch.

    fields: name -> tensor of shape (num_samples + num_padded, *sample_shape).
    num_samples: may be 0: the last batch of an epoch can have fewer samples than there are ranks.
    num_padded: number of padding rows at the end of the tensors (`LastBatch.PAD`). They repeat other samples and
    must not be counted: `real()` returns the batch without them, `valid` is a mask of the other rows.
    start: position of the global batch in the epoch, in samples.
    global_samples: samples of all ranks in the global batch, without padding.
    num_skipped: samples of this rank that are left out because they lie in damaged blocks (`OnDamage.SKIP`).
    global_skipped: the same over all ranks; 0 until the ranks exchanged it (`hpctrain.train.loop.agreed_batches`).
    indices: number in the dataset of the sample in each row: int64, shape (num_samples + num_padded,); None if unknown.

    The mean loss over this rank's num_samples, times `weight`, summed over the ranks, is the mean over the global
    batch, however it was split.
    """

    fields: dict[str, torch.Tensor]
    epoch: int
    start: int
    num_samples: int
    global_samples: int
    num_padded: int = 0
    num_skipped: int = 0
    global_skipped: int = 0
    indices: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)

    @property
    def stop(self) -> int:
        """Position in the epoch after this global batch, at which a run that stops here resumes."""
        return self.start + self.global_samples

    @property
    def weight(self) -> float:
        """This rank's share of the global batch: num_samples / (global_samples - global_skipped)."""
        return self.num_samples / max(1, self.global_samples - self.global_skipped)

    @property
    def valid(self) -> torch.Tensor:
        """Mask of the rows that are not padding: bool, shape (num_samples + num_padded,)."""
        device = next((tensor.device for tensor in self.fields.values()), None)
        return torch.arange(self.num_samples + self.num_padded, device=device) < self.num_samples

    def real(self) -> Batch:
        """Returns the batch without padding; its tensors are views of this one's."""
        if not self.num_padded:
            return self
        fields = {name: tensor[: self.num_samples] for name, tensor in self.fields.items()}
        indices = None if self.indices is None else self.indices[: self.num_samples]
        return replace(self, fields=fields, num_padded=0, indices=indices)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.fields.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]

    def split(self, num_parts: int) -> list[Batch]:
        """Returns `num_parts` micro-batches, views of this batch; sizes differ by at most one row.

        Their weights add up to `weight`. With fewer rows than parts some are empty, so that every rank has the
        same number of parts. Padding is split with the other rows: the last parts may hold nothing else.
        Raises UsageError if `num_parts` is below 1.
        """
        if num_parts < 1:
            raise UsageError(f"cannot split a batch into {num_parts} parts; at least 1 is needed")
        rows = self.num_samples + self.num_padded
        spans = [rank_share(0, rows, rank=part, num_ranks=num_parts) for part in range(num_parts)]
        return [self._part(span) for span in spans]

    def _part(self, span: Span) -> Batch:
        fields = {name: tensor[span.start : span.stop] for name, tensor in self.fields.items()}
        real = max(0, min(span.stop, self.num_samples) - span.start)
        indices = None if self.indices is None else self.indices[span.start : span.stop]
        return replace(
            self, fields=fields, num_samples=real, num_padded=span.num_samples - real, indices=indices
        )

    def to(
        self, device: torch.device | str, *, dtype: torch.dtype | None = None, non_blocking: bool = True
    ) -> Batch:
        """Returns the batch on `device`; copies from pinned memory overlap with computation there.

        dtype: converts all floating-point fields; None: keeps their dtypes. Integer and bool fields are never
        converted.
        """
        fields = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.fields.items()}
        if dtype is not None:
            # After the copy: a copy that also converts would convert on the CPU, into memory that is not pinned.
            fields = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in fields.items()
            }
        return replace(self, fields=fields)
