"""Direct engine: every rank writes its extents at the datasets' places with pwrite, past the HDF5 library.

Works on any POSIX filesystem that all ranks see, without MPI.
"""

from __future__ import annotations

import os

from hpctrain.checkpoint.boxes import runs_of
from hpctrain.checkpoint.file_bytes import explained, write_fully
from hpctrain.checkpoint.hashing import hash_of
from hpctrain.checkpoint.hdf5_file import create_datasets
from hpctrain.checkpoint.writing import WriteJob, Written
from hpctrain.comm.agreement import agreed, on_rank_0
from hpctrain.errors import CheckpointError


def write_direct(job: WriteJob) -> Written:
    """Create the file and write all content; on disk (fsync) when it returns. Collective.

    Raises CheckpointError on every rank when any rank fails.
    """
    offsets = on_rank_0(job.comm, lambda: create_datasets(job.path, tensors=job.plan.tensors))
    hashes = agreed(job.comm, lambda: _write_extents(job, offsets), os_error=CheckpointError)
    return Written(file_offsets=offsets, hashes=hashes)


def _write_extents(job: WriteJob, offsets: list[int]) -> list[str]:
    hashes = []
    with explained(action="write", path=job.path):
        fd = os.open(job.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for extent, tensor, data in job.own_extents():
                hashes.append(hash_of(data))
                runs = runs_of(extent.box, shape=tensor.view)
                run_bytes = runs.run_elems * tensor.elem_bytes
                view = data.data
                for place, start in enumerate(runs.starts.tolist()):
                    piece = view[place * run_bytes : (place + 1) * run_bytes]
                    write_fully(fd, piece, offset=offsets[extent.tensor] + start * tensor.elem_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
    return hashes
