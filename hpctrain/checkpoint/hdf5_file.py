"""The HDF5 side of a checkpoint: contiguous datasets at fixed places, and the metadata. Only saving needs it.

h5py is imported when a save begins, not before: it is not needed to load, and may be absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.dtypes import is_raw, storage_dtype
from hpctrain.checkpoint.file_bytes import reason_of
from hpctrain.checkpoint.metadata import TENSOR_GROUP
from hpctrain.checkpoint.names import MAX_NAME_BYTES, escape
from hpctrain.checkpoint.plan import PlannedTensor
from hpctrain.checkpoint.seal import FORMAT_VERSION, SEAL_BYTES
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

METADATA_DATASET = "metadata"

# Object headers of HDF5 1.8 are smaller and faster than the oldest ones; 1.10 can read all we write.
# locking: we never have two writers of a file that do not know of each other, and some network filesystems
# refuse locks. Alignment: large datasets begin at a page.
_FILE_OPTIONS: dict[str, Any] = {"libver": ("v108", "v110"), "locking": False}
_CREATE_OPTIONS: dict[str, Any] = {
    **_FILE_OPTIONS,
    "userblock_size": SEAL_BYTES,
    "alignment_threshold": 1 << 16,
    "alignment_interval": 4096,
}


@contextmanager
def hdf5_errors(*, action: str, path: Path) -> Iterator[None]:
    """HDF5 reports a full disk and a bad name alike through several exception types: one CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot {action} {path} through HDF5: {reason}") from error


def import_h5py() -> Any:
    """h5py. Raises CheckpointError when it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise CheckpointError(f"saving a checkpoint needs h5py: {error}") from error
    return h5py


def create_datasets(path: Path, *, tensors: Sequence[PlannedTensor], **driver: Any) -> list[int]:
    """Create the file with one empty dataset per tensor; the place of each one's first byte in the file.

    Collective with `driver="mpio"` and an MPI communicator in `comm`; else one rank calls it. A tensor
    without elements has no place: 0. Source of the trick: contiguous storage that is allocated early and
    never filled has a fixed place, where anyone may write (H5Dget_offset).
    """
    h5py = import_h5py()
    with hdf5_errors(action="create", path=path), h5py.File(path, "w", **_CREATE_OPTIONS, **driver) as file:
        group = file.create_group(TENSOR_GROUP)
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.CONTIGUOUS)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        return [_create_dataset(h5py, group, tensor, creation) for tensor in tensors]


def _create_dataset(h5py: Any, group: Any, tensor: PlannedTensor, creation: Any) -> int:
    link = escape(tensor.name).encode()
    if len(link) > MAX_NAME_BYTES:
        raise CheckpointError(f"a tensor's name is {len(link)} bytes long, the limit is {MAX_NAME_BYTES}")
    if len(tensor.shape) > 32:
        raise CheckpointError(
            f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, HDF5 has at most 32"
        )
    if tensor.shape:
        space = h5py.h5s.create_simple(tensor.shape)
    else:
        space = h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.py_create(storage_dtype(tensor.dtype), logical=True)
    dataset = h5py.h5d.create(group.id, link, kind, space, creation)
    if is_raw(tensor.dtype):
        h5py.Dataset(dataset).attrs["torch_dtype"] = tensor.dtype
    return int(dataset.get_offset()) if tensor.num_bytes else 0


def add_metadata(path: Path, *, data: bytes, digest: str) -> int:
    """Add the dataset `/metadata` and the root attributes; the place of its first byte. One rank calls it."""
    h5py = import_h5py()
    with hdf5_errors(action="add the metadata to", path=path), h5py.File(path, "r+", **_FILE_OPTIONS) as file:
        dataset = file.create_dataset(METADATA_DATASET, data=np.frombuffer(data, dtype=np.uint8))
        file.attrs["hpctrain_format"] = FORMAT_VERSION
        file.attrs["metadata_xxh3_64"] = digest
        return int(dataset.id.get_offset())


def open_for_data(path: Path, *, comm: Any, info: Any) -> Any:
    """The file opened by all ranks of the MPI communicator `comm` to write content. Collective."""
    return import_h5py().File(path, "r+", driver="mpio", comm=comm, info=info, **_FILE_OPTIONS)
