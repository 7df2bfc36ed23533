"""Strings of files as class names."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def class_texts(values: NDArray[Any] | Any) -> list[str]:
    """Strings as h5py reads them (bytes or str, fixed or variable length) as text, one an element.

    Raises UnicodeDecodeError (a ValueError) if bytes are no UTF-8.
    """
    flat = np.atleast_1d(np.asarray(values)).reshape(-1)
    return [value.decode("utf-8") if isinstance(value, bytes) else str(value) for value in flat.tolist()]
