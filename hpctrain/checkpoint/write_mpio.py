"""MPI-IO engine: the file is created and written by all ranks through parallel HDF5.

Transfers are independent: a rank without bytes to write then has nothing to take part in (h5py#965), and the
file-collective modules of Open MPI stay out of the way (silent corruption, ompi#12718). Content is written
in a second opening of the file, when all of HDF5's own structures are on disk: a rank that fails there has
nothing unwritten that would make the collective close fail or hang.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Any

from hpctrain.checkpoint.boxes import Box, boxes_of_range
from hpctrain.checkpoint.dtypes import storage_dtype
from hpctrain.checkpoint.file_bytes import explained
from hpctrain.checkpoint.hashing import hash_of
from hpctrain.checkpoint.hdf5_file import create_datasets, hdf5_errors, import_h5py, open_for_data
from hpctrain.checkpoint.metadata import TENSOR_GROUP
from hpctrain.checkpoint.names import escape
from hpctrain.checkpoint.plan import Extent, PlannedTensor
from hpctrain.checkpoint.writing import WriteJob, Written
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Collective
from hpctrain.errors import CheckpointError, HpctrainError


def obstacle_to_mpio(comm: Collective) -> str | None:
    """Why this rank cannot use the engine; None when it can. Does not communicate."""
    if comm.backend not in ("mpi", "horovod"):
        return f"the {comm.backend} backend has no MPI ranks"
    try:
        if not import_h5py().get_config().mpi:
            return "h5py is built without parallel HDF5"
    except CheckpointError as error:
        return str(error)
    if comm.backend == "horovod" and not _started_by_mpi():
        # Asking mpi4py would start MPI in a process that no MPI launcher knows.
        return "Horovod runs without MPI"
    try:
        from mpi4py import MPI
    except ImportError as error:
        return f"mpi4py cannot be imported: {error}"
    world_rank, world_size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if comm.members[comm.rank] != world_rank or max(comm.members) >= world_size:
        return f"MPI counts this rank as {world_rank} of {world_size}, the run as {comm.members[comm.rank]}"
    return None


def _started_by_mpi() -> bool:
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK"))


def write_mpio(job: WriteJob) -> Written:
    """Create the file and write all content; on disk (fsync) when it returns. Collective.

    `obstacle_to_mpio` is None on every rank. Raises CheckpointError on every rank when any rank fails.
    """
    from mpi4py import MPI

    # Collective opening needs every rank to reach the directory: ask before, where a vote is still possible.
    agreed(job.comm, lambda: _check_directory(job))
    group = MPI.COMM_WORLD.Get_group().Incl(list(job.comm.members))
    ranks = MPI.COMM_WORLD.Create_group(group)
    # Data sieving turns small writes into read-modify-write of what other ranks write (ROMIO).
    info = MPI.Info.Create()
    info.Set("romio_ds_write", "disable")
    try:
        offsets = agreed(
            job.comm,
            lambda: create_datasets(job.path, tensors=job.plan.tensors, driver="mpio", comm=ranks, info=info),
        )
        with hdf5_errors(action="open", path=job.path):
            file = open_for_data(job.path, comm=ranks, info=info)
        try:
            hashes = agreed(job.comm, lambda: _write_extents(job, file))
        except HpctrainError:
            with suppress(
                Exception
            ):  # collective: every rank is here, and the first error is the one to tell
                file.close()
            raise
        agreed(job.comm, lambda: _close(job, file))
        agreed(job.comm, lambda: _sync(job))
    finally:
        info.Free()
        ranks.Free()
        group.Free()
    return Written(file_offsets=offsets, hashes=hashes)


def _check_directory(job: WriteJob) -> None:
    directory = job.path.parent
    with explained(action="write checkpoints to", path=directory):
        os.stat(directory)
        effective = os.access in os.supports_effective_ids
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=effective):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _close(job: WriteJob, file: Any) -> None:
    with hdf5_errors(action="close", path=job.path):
        file.close()


def _sync(job: WriteJob) -> None:
    with explained(action="write to disk", path=job.path):
        fd = os.open(job.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_extents(job: WriteJob, file: Any) -> list[str]:
    h5py = import_h5py()
    transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5py.h5fd.MPIO_INDEPENDENT)
    hashes = []
    with hdf5_errors(action="write", path=job.path):
        for extent, tensor, data in job.own_extents():
            hashes.append(hash_of(data))
            dataset = file[TENSOR_GROUP][escape(tensor.name)].id
            # The same bytes as numbers of the dataset's type: HDF5 has nothing to convert.
            elements = data.view(storage_dtype(tensor.dtype))
            start = 0
            for box in _hyperslabs(extent, tensor):
                space = dataset.get_space()
                if tensor.shape:
                    space.select_hyperslab(box.offset, box.shape)
                part = elements[start : start + box.num_elems]
                memory = h5py.h5s.create_simple(part.shape)
                dataset.write(memory, space, part, mtype=dataset.get_type(), dxpl=transfer)
                start += box.num_elems
    return hashes


def _hyperslabs(extent: Extent, tensor: PlannedTensor) -> list[Box]:
    """The extent as boxes of the tensor's own shape, in the order of its memory."""
    if tensor.view == tensor.shape:
        return [extent.box]
    start = extent.box.offset[0]
    return boxes_of_range(tensor.shape, start=start, stop=start + extent.box.shape[0])
