"""Maps the dtypes of stored and transformed arrays to torch dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# torch has these dtypes, but supports few operations on them: they are widened.
WIDENED: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"uint16": np.dtype(np.int32), "uint32": np.dtype(np.int64)}
)


def torch_dtype(stored: str) -> torch.dtype:
    """Returns the dtype of a stored field in batches: the stored one, but int32 for uint16 and int64 for uint32."""
    return torch.from_numpy(np.empty(0, dtype=WIDENED.get(stored, np.dtype(stored)))).dtype


def as_tensor(array: NDArray[Any], *, pin_memory: bool = False) -> torch.Tensor:
    """Returns the array as a tensor that shares its memory; a copy if it is widened, pinned, or read-only."""
    wide = WIDENED.get(array.dtype.name)
    if wide is not None or not array.flags.writeable:
        array = array.astype(wide or array.dtype)
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin_memory else tensor
