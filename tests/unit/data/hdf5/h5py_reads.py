"""What h5py reads of a random file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5s, h5t
from numpy.typing import NDArray

from tests.unit.data.hdf5.random_files import DrawnFile


def wanted(path: Path, made: DrawnFile) -> NDArray[Any] | None:
    """What h5py reads; None if it cannot, or if it returns something other than numbers and strings."""
    member = made.drawn.member
    with h5py.File(path, "r") as file:
        try:
            dataset = file["x"]
        except KeyError:  # HDF5 2 takes types with few used bits for damaged ones
            return None
        try:
            return np.asarray(dataset[...] if member is None else dataset.fields(member)[...])
        except (TypeError, ValueError, OSError, RuntimeError, KeyError):
            pass
        # h5py cannot read any member if numpy lacks the dtype of one: read this one as numpy's dtype for it.
        kind = dataset.id.get_type()
        if member is None:
            return None
        try:
            dtype = kind.get_member_type(kind.get_member_index(member.encode())).dtype
            if dtype.hasobject:
                return np.asarray(dataset.__getitem__((), new_dtype=np.dtype([(member, dtype)]))[member])
            memory = h5t.create(h5t.COMPOUND, dtype.itemsize)
            memory.insert(member.encode(), 0, h5t.py_create(dtype))
            found = np.zeros((*dataset.shape, dtype.itemsize), dtype=np.uint8)
            dataset.id.read(h5s.ALL, h5s.ALL, found, memory)
        except (TypeError, ValueError, OSError, RuntimeError):
            return None
        base, shape = dtype, dataset.shape
        while base.subdtype is not None:
            base, more = base.subdtype
            shape += more
        return found.reshape(-1).view(base).reshape(shape)
