"""Token stream of concatenated documents whose lengths are known before they are read."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.errors import DataError

TOKEN_DTYPES = ("uint8", "uint16", "int32")


class Documents(Protocol):
    """Ordered documents. starts: int64, shape (number + 1,): first token of each, then the length of the stream."""

    @property
    def dtype(self) -> str: ...

    @property
    def starts(self) -> NDArray[np.int64]: ...

    @property
    def identity(self) -> JsonValue:
        """Value that changes with the content, found without reading the documents."""

    def read(self, number: int, *, start: int, stop: int) -> NDArray[Any]:
        """Returns tokens start, ..., stop - 1 of one document, shape (stop - start,). Raises DataError."""


def read_stream(documents: Documents, *, start: int, stop: int) -> NDArray[Any]:
    """Returns tokens start, ..., stop - 1 of the concatenated documents. Raises DataError."""
    starts = documents.starts
    stream = np.empty(stop - start, dtype=documents.dtype)
    number = int(np.searchsorted(starts, start, side="right")) - 1
    position = start
    while position < stop:
        begin, end = int(starts[number]), int(starts[number + 1])
        until = min(stop, end)
        if until > position:
            stream[position - start : until - start] = documents.read(
                number, start=position - begin, stop=until - begin
            )
            position = until
        number += 1
    return stream


def check_token_dtype(dtype: str) -> None:
    """Raises DataError if `dtype` is not in TOKEN_DTYPES."""
    if dtype not in TOKEN_DTYPES:
        raise DataError(f"tokens cannot have dtype {dtype}: choose uint8, uint16 or int32")


def as_tokens(chunk: NDArray[Any], *, dtype: str) -> NDArray[Any]:
    """Returns `chunk` as `dtype`. Raises DataError if it is not integers of shape (n,), or they do not fit."""
    array = np.asarray(chunk)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"a chunk of tokens has shape {array.shape} and dtype {array.dtype}, not (n,) integers"
        )
    limits = np.iinfo(dtype)
    if len(array) and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise DataError(
            f"tokens from {array.min()} to {array.max()} do not fit into {dtype}: choose a wider dtype"
        )
    return array.astype(dtype, copy=False)
