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
    """Returns the torch dtype that a field has in batches.

    The result is the stored dtype, except that uint16 becomes int32, and uint32 becomes int64.
    """
    return torch.from_numpy(np.empty(0, dtype=WIDENED.get(stored, np.dtype(stored)))).dtype


def as_tensor(array: NDArray[Any], *, pin_memory: bool = False) -> torch.Tensor:
    """Returns the array as a tensor that shares the memory of the array.

    The tensor is a copy if the array has a dtype in `WIDENED`, if the array is read-only, or with `pin_memory`.
    """
    wide = WIDENED.get(array.dtype.name)
    if wide is not None or not array.flags.writeable:
        array = array.astype(wide or array.dtype)
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin_memory else tensor
