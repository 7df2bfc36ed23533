"""Documents in memory, as a source of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.packing.shard_makers import as_tokens, check_token_dtype


@dataclass(frozen=True)
class TokenArrays:
    """Documents in memory: integer arrays of shape (n,)."""

    arrays: Sequence[NDArray[Any]]
    dtype: str = "uint8"
    identity: JsonValue = None

    def __post_init__(self) -> None:
        check_token_dtype(self.dtype)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum([len(array) for array in self.arrays])]).astype(np.int64)

    def read(self, number: int, *, start: int, stop: int) -> NDArray[Any]:
        return as_tokens(self.arrays[number][start:stop], dtype=self.dtype)
