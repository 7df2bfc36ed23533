"""A stored checkpoint's tensors as memory mapped from its files: to save it again without holding it.

The content is not verified here; whoever maps it has verified the checkpoint first. A file that is cut short while it
is mapped ends the process (SIGBUS), as does a disk that fails.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.files.full_io import explained
from hpctrain.checkpoint.format.boxes import Box, boxes_of_range, split_box
from hpctrain.checkpoint.format.dtypes import dtype_named, empty_tensor
from hpctrain.checkpoint.format.metadata import StoredPiece, StoredTensor
from hpctrain.checkpoint.format.state import Replicated, Shard, State
from hpctrain.checkpoint.loading.check_structure import opened
from hpctrain.checkpoint.loading.checkpoint import Checkpoint
from hpctrain.checkpoint.saving.save import SaveResult, save
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.collectives.agreement import agreed
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError, UsageError

# A rank gets whole shards of at most this size: small against its share, so that the shares come out alike.
SHARD_BYTES = 32 << 20
THREADS_TIMEOUT_S = 7 * 86400.0  # a copy may be of terabytes


def map_items(checkpoint: Checkpoint, *, rank: int, num_ranks: int) -> list[Replicated | Shard]:
    """What `rank` of `num_ranks` hands over to save a checkpoint again. Not collective.

    A tensor that is stored in one piece is replicated: every rank maps it, and the save divides it. One in several
    pieces is dealt to the ranks as shards, alike in bytes. Memory: none but the pages in use, which the system drops
    when it needs them. Raises CheckpointError.
    """
    tensors = checkpoint.tensors
    numbers = {piece.file for tensor in tensors.values() for piece in tensor.pieces if piece.box.num_elems}
    files = {number: _map_file(checkpoint.files[number]) for number in sorted(numbers)}
    items: list[Replicated | Shard] = []
    pieced: list[tuple[StoredTensor, Box, torch.Tensor]] = []
    for tensor in tensors.values():
        if math.prod(tensor.shape) == 0:
            items.append(Replicated(name=tensor.name, tensor=empty_tensor(tensor.shape, dtype=tensor.dtype)))
        elif len(tensor.pieces) == 1:
            piece = tensor.pieces[0]
            content = _content(files[piece.file], piece, tensor=tensor)
            items.append(Replicated(name=tensor.name, tensor=content.reshape(tensor.shape)))
        else:
            for piece in tensor.pieces:
                content = _content(files[piece.file], piece, tensor=tensor)
                pieced += [(tensor, *part) for part in _shards_of(content, piece, tensor=tensor)]
    total_bytes = sum(box.num_elems * tensor.elem_bytes for tensor, box, _ in pieced)
    begin = 0
    for tensor, box, content in pieced:
        middle = begin + box.num_elems * tensor.elem_bytes // 2
        if middle * num_ranks // total_bytes == rank:
            shape = tuple(tensor.shape)
            items.append(Shard(name=tensor.name, tensor=content, global_shape=shape, offset=box.offset))
        begin += box.num_elems * tensor.elem_bytes
    return items


def save_in_files(
    state_of: Callable[[int, int], State],
    *,
    directory: Path,
    step: int,
    files: int,
    comm: Collective,
    **options: Any,
) -> SaveResult:
    """Save what `state_of(rank, number of ranks)` gives, in any number of files; older checkpoints stay. Collective.

    A file has at least one rank that writes it: a single process writes several files as so many threads.
    options: of `save`. Raises as `save`, and UsageError when several ranks are fewer than the files.
    """

    def save_part(part: Collective) -> SaveResult:
        state = agreed(part, lambda: state_of(part.rank, part.num_ranks), os_error=CheckpointError)
        # All ranks read the same files: there is nothing to compare.
        return save(
            state,
            directory=directory,
            step=step,
            comm=part,
            keep=None,
            files=files,
            replica_check="off",
            **options,
        )

    if files <= comm.num_ranks:
        return save_part(comm)
    if comm.num_ranks > 1:
        raise UsageError(
            f"{files} files by {comm.num_ranks} ranks: start one rank, or at least as many as files",
            agreed=True,
        )
    return run_threads(files, save_part, timeout_s=THREADS_TIMEOUT_S)[0]


def _map_file(path: Path) -> np.ndarray:
    """Shape (file's bytes,), uint8, read-only."""
    with opened(path) as fd, explained(action="map", path=path):
        return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)


def _content(file: np.ndarray, piece: StoredPiece, *, tensor: StoredTensor) -> torch.Tensor:
    """The piece's elements, shape (num_elems,). Nobody writes to it: torch has no read-only tensors."""
    num_bytes = piece.box.num_elems * tensor.elem_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not writable
        content = torch.from_numpy(file[piece.file_offset : piece.file_offset + num_bytes])
        return content.view(dtype_named(tensor.dtype))


def _shards_of(
    content: torch.Tensor, piece: StoredPiece, *, tensor: StoredTensor
) -> list[tuple[Box, torch.Tensor]]:
    """The piece as boxes of the tensor's own shape, each a contiguous stretch of `content`."""
    if tensor.view == tensor.shape:
        boxes = [piece.box]
    else:
        first = piece.box.offset[0]
        boxes = boxes_of_range(tensor.shape, start=first, stop=first + piece.box.num_elems)
    found, start = [], 0
    for box in boxes:
        for part in split_box(box, max_elems=max(1, SHARD_BYTES // tensor.elem_bytes)):
            found.append((part, content[start : start + part.num_elems].reshape(part.shape)))
            start += part.num_elems
    return found
