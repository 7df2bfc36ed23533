"""Which torch dtype a stored or transformed array has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# torch's own dtypes for these can be stored, but hardly computed with: they are widened.
WIDENED: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"uint16": np.dtype(np.int32), "uint32": np.dtype(np.int64)}
)


def torch_dtype(stored: str) -> torch.dtype:
    """The dtype that batches have: the stored one, but uint16 becomes int32 and uint32 becomes int64."""
    return torch.from_numpy(np.empty(0, dtype=WIDENED.get(stored, np.dtype(stored)))).dtype


def as_tensor(array: NDArray[Any], *, pin_memory: bool = False) -> torch.Tensor:
    """The array's memory as a tensor; copied if it has to be widened or pinned, or may not be written to."""
    wide = WIDENED.get(array.dtype.name)
    if wide is not None or not array.flags.writeable:
        array = array.astype(wide or array.dtype)
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin_memory else tensor
