"""A sample of zeros, for what a rank must compute although it has no samples."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.data import Batch


def row_of_zeros(batch: Batch) -> Batch:
    """Returns a batch of one sample, zeros in fields of the same sample shapes and dtypes as those of `batch`."""
    fields = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.fields.items()}
    return replace(batch, fields=fields, num_samples=1, num_padded=0, indices=None)
