"""What readers of a field agree on: which elements are wanted, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.reading.decode_pool import Task
from hpctrain.errors import DataError

# From this size on, one copy a sample costs less than gathering into a buffer and scattering from there.
ROW_COPY_BYTES = 2048


class Request(NamedTuple):
    """Samples of one field of one shard.

    samples: numbers within the shard, shape (n,). starts: first row of each in the HDF5 dataset, (n,).
    places: where in `target` each goes, (n,); None: all of it, in order.
    target: C-contiguous, native-endian, shape (batch, rows a sample, *rest of a row).
    lengths: int64 (batch,), filled at the same places for ragged fields; None for others.
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
    """Reads one field of one shard. Safe in threads."""

    def begin(self, request: Request) -> Sequence[Task]:
        """Read what is at hand; returns tasks for the rest, to be run in any order and by any thread.

        The errors of both are DataError that name shard, field and samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldName:
    """A field of a shard, as errors name it."""

    path: Path
    field: str

    def error(self, samples: NDArray[np.int64] | Sequence[int], reason: object) -> DataError:
        """samples: numbers within the shard."""
        first, last = int(min(samples)), int(max(samples))
        which = f"sample {first}" if first == last else f"samples {first} to {last}"
        return DataError(f"field {self.field!r}, {which} of shard {self.path} cannot be read: {reason}")
