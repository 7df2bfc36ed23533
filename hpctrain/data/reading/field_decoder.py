"""Decodes the fields of a batch after their stored values were read, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import Manifest
from hpctrain.data.format.manifest_entries import Packing
from hpctrain.data.format.value_decoding import MASK_SUFFIX, decode
from hpctrain.errors import DataError

Arrays = Mapping[str, NDArray[Any]]


@final
class FieldDecoder:
    """Decodes the fields of `Manifest.decoding`; leaves the others as they are. Thread-safe."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.fields = manifest.batch_fields
        """Fields of a batch."""
        self.stored_fields = manifest.stored_batch_fields
        """Arrays to be read for them."""

    def arrays(self, num_samples: int, *, out: Arrays | None) -> tuple[dict[str, NDArray[Any]], Arrays]:
        """Returns the arrays of a batch, those of `out` where it has them, and the arrays to read, which are the same
        ones for fields that are not decoded."""
        given = out or {}
        batch = {
            name: given[name] if name in given else np.empty((num_samples, *spec.shape), spec.dtype)
            for name, spec in self.fields.items()
        }
        if not self._manifest.decoding:
            return batch, batch
        decoded = self._manifest.decoding
        stored = {
            name: batch[name]
            if name in batch and name not in decoded
            else np.empty((num_samples, *spec.shape), spec.dtype)
            for name, spec in self.stored_fields.items()
        }
        return batch, stored

    def decode(
        self, stored: Arrays, batch: Arrays, *, groups: Sequence[tuple[int, NDArray[np.int64] | None]]
    ) -> None:
        """Fills the decoded fields of `batch`. groups: (shard, places of its samples); None: all places.

        Raises DataError that names the field and the shard if a value cannot be decoded.
        """
        for name, how in self._manifest.decoding.items():
            for number, places in groups:
                where = slice(None) if places is None else places
                entry = self._manifest.shards[number]
                try:
                    values, missing = decode(
                        stored[name][where],
                        packing=entry.fields[name].packing or Packing(),
                        decoding=how,
                        mask=None if how.mask is None else stored[how.mask][where],
                    )
                except DataError as error:
                    raise DataError(f"field {name!r} of shard {entry.file}: {error}") from error
                batch[name][where] = values
                if how.missing == "mask":
                    batch[name + MASK_SUFFIX][where] = missing
