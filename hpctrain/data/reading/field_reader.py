"""Shared by all readers of a field: the request, which selects elements and their destination; the open file; the name
of the field in errors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.reading.decode_pool import Task
from hpctrain.errors import DataError

# From this size on, one copy per sample costs less than gathering into a buffer and scattering from there.
ROW_COPY_BYTES = 2048


class Request(NamedTuple):
    """Samples of one field of one shard.

    samples: numbers within the shard, shape (n,). starts: first row of each in the HDF5 dataset, shape (n,).
    places: row of `target` for each sample, shape (n,); None: all rows, in order.
    target: C-contiguous, native-endian, shape (batch, rows per sample, *rest of a row).
    lengths: int64, shape (batch,), filled at the same places for ragged fields; None for others.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    places: NDArray[np.int64] | None
    target: NDArray[Any]
    lengths: NDArray[np.int64] | None = None

    @property
    def all_places(self) -> NDArray[np.int64]:
        return np.arange(len(self.starts)) if self.places is None else self.places

    @property
    def rows_a_sample(self) -> int:
        return int(self.target.shape[1])

    @property
    def sample_bytes(self) -> int:
        return self.target[:1].nbytes


class FieldReader(Protocol):
    """Reads one field of one shard. Thread-safe."""

    def begin(self, request: Request) -> Sequence[Task]:
        """Reads what is cheap to read now; returns tasks for the rest, to be run in any order by any thread.

        This method and the tasks raise DataError that names shard, field and samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldName:
    """Names a field of a shard in errors."""

    path: Path
    field: str

    def error(self, samples: NDArray[np.int64] | Sequence[int], reason: object) -> DataError:
        """Returns the error to raise. samples: numbers within the shard, at least one."""
        first, last = int(min(samples)), int(max(samples))
        which = f"sample {first}" if first == last else f"samples {first} to {last}"
        return DataError(f"field {self.field!r}, {which} of shard {self.path} cannot be read: {reason}")


@final
class OpenFile:
    """A file opened for reading, closed with the last reference. Raises OSError if it cannot be opened.

    Keep this object, not its descriptor number, which may belong to another file after it was closed.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Closes the file now. May be called more than once."""
        self._close()
