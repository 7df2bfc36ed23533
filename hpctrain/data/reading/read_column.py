"""Reads one number for each sample, from a field of the dataset or from a .npy file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import Manifest
from hpctrain.data.reading.dataset import Dataset
from hpctrain.errors import DataError

_ROWS_AT_ONCE = 1 << 18


def read_column(dataset: Dataset, source: str) -> NDArray[Any]:
    """Returns one number for each sample, shape (num_samples,), in the dataset's order; for weights and strata.

    source: the name of a field with one number per sample, or else the path of a .npy file. Only that field is read.
    The whole column is held in memory. Raises DataError if `source` is neither, or has another shape or dtype.
    """
    if source in dataset.fields:
        column = _field(dataset, source)
    elif source.endswith(".npy"):
        column = _file(Path(source))
    else:
        raise DataError(
            f"{source!r} is not a field of {dataset.directory}, which has {', '.join(dataset.fields)}, nor a .npy file"
        )
    if column.shape != (dataset.num_samples,) or column.dtype.kind not in "biuf":
        raise DataError(
            f"{source!r} is {column.dtype.name} of shape {column.shape}; one number for each of the "
            f"{dataset.num_samples} samples of {dataset.directory} is needed"
        )
    return column


def _field(dataset: Dataset, name: str) -> NDArray[Any]:
    spec = dataset.fields[name]
    if spec.shape not in ((), (1,)):
        raise DataError(
            f"field {name!r} of {dataset.directory} has shape {spec.shape} in each sample: one number is needed"
        )
    only = Dataset(dataset.directory, manifest=_with_one_field(dataset.manifest, name))
    column = np.empty((dataset.num_samples, *spec.shape), dtype=spec.dtype)
    for first in range(0, len(column), _ROWS_AT_ONCE):
        indices = np.arange(first, min(first + _ROWS_AT_ONCE, len(column)), dtype=np.int64)
        only.gather(indices, out={name: column[first : first + len(indices)]})
    return column.reshape(len(column))


def _with_one_field(manifest: Manifest, name: str) -> Manifest:
    # The structure hash covers all bytes outside the fields, so it is not valid for a subset of the fields.
    how = manifest.decoding.get(name)
    names = [name] if how is None or how.mask is None else [name, how.mask]
    shards = tuple(
        entry.model_copy(
            update={"fields": {each: entry.fields[each] for each in names}, "structure_hash": None}
        )
        for entry in manifest.shards
    )
    fields = {each: manifest.fields[each] for each in names}
    decoding = {} if how is None else {name: how}
    return manifest.model_copy(update={"fields": fields, "decoding": decoding, "shards": shards})


def _file(path: Path) -> NDArray[Any]:
    try:
        column: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}") from error
    return column
