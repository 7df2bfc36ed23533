"""Memory-maps the tensors of a checkpoint, to save it again without reading it into memory.

Does not verify the content: the caller must verify the checkpoint first. If a mapped file is truncated or its disk
fails, the process ends with SIGBUS.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, boxes_of_range, split_box
from hpctrain.checkpoint.format.dtypes import dtype_named, empty_tensor
from hpctrain.checkpoint.format.metadata import StoredPiece, StoredTensor
from hpctrain.checkpoint.format.state import Replicated, Shard, State
from hpctrain.checkpoint.loading.check_structure import opened
from hpctrain.checkpoint.loading.checkpoint import Checkpoint
from hpctrain.checkpoint.saving.save import SaveResult, save
from hpctrain.comm import Collective, agreed, run_threads
from hpctrain.errors import CheckpointError, UsageError

# Maximum size of the shards that are dealt to the ranks: small against a rank's share, so that the shares are balanced.
SHARD_BYTES = 32 << 20
THREADS_TIMEOUT_S = 7 * 86400.0  # a copy can take terabytes


def map_items(checkpoint: Checkpoint, *, rank: int, num_ranks: int) -> list[Replicated | Shard]:
    """Returns the items that `rank` of `num_ranks` passes to a save of the same content. Not collective.

    A tensor stored in one piece is replicated: every rank maps it, and the save divides it. A tensor in several pieces
    is distributed over the ranks as shards, balanced in bytes. The tensors use only page cache. Raises CheckpointError.
    """
    tensors = checkpoint.tensors
    numbers = {piece.file for tensor in tensors.values() for piece in tensor.pieces if piece.box.num_elems}
    files = {number: map_file(checkpoint.files[number]) for number in sorted(numbers)}
    items: list[Replicated | Shard] = []
    shards: list[Shard] = []
    for tensor in tensors.values():
        if math.prod(tensor.shape) == 0:
            items.append(Replicated(name=tensor.name, tensor=empty_tensor(tensor.shape, dtype=tensor.dtype)))
        elif len(tensor.pieces) == 1:
            piece = tensor.pieces[0]
            content = _content(files[piece.file], piece, tensor=tensor)
            items.append(Replicated(name=tensor.name, tensor=content.reshape(tensor.shape)))
        else:
            shape = tuple(tensor.shape)
            for piece in tensor.pieces:
                content = _content(files[piece.file], piece, tensor=tensor)
                shards += [
                    Shard(name=tensor.name, tensor=part, global_shape=shape, offset=box.offset)
                    for box, part in _shards_of(content, piece, tensor=tensor)
                ]
    return [*items, *shards_of_rank(shards, rank=rank, num_ranks=num_ranks)]


def shards_of_rank(shards: Sequence[Shard], *, rank: int, num_ranks: int) -> list[Shard]:
    """Returns those of all `shards` that `rank` passes to a save: neighbours, with about equal bytes on each rank."""
    total_bytes = sum(shard.tensor.nbytes for shard in shards)
    found, begin = [], 0
    for shard in shards:
        middle = begin + shard.tensor.nbytes // 2
        if middle * num_ranks // total_bytes == rank:
            found.append(shard)
        begin += shard.tensor.nbytes
    return found


def save_in_files(
    state_of: Callable[[int, int], State],
    *,
    directory: Path,
    step: int,
    files: int,
    comm: Collective,
    **options: Any,
) -> SaveResult:
    """Saves `state_of(rank, num_ranks)` in `files` files and keeps older checkpoints. Collective.

    Each file needs at least one rank: a single process writes several files with that many threads as ranks.
    options: options of `save`. Raises as `save`, and UsageError if there are several ranks but fewer than files.
    """

    def save_part(part: Collective) -> SaveResult:
        state = agreed(part, lambda: state_of(part.rank, part.num_ranks), os_error=CheckpointError)
        # All ranks map the same files, so their copies need not be compared.
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


def map_file(path: Path) -> NDArray[Any]:
    """Returns the mapped file: uint8, shape (file's bytes,), read-only."""
    with opened(path) as fd, explained(action="map", path=path):
        return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)


def _content(file: NDArray[Any], piece: StoredPiece, *, tensor: StoredTensor) -> torch.Tensor:
    """Returns the piece's elements: the tensor's dtype, shape (num_elems,). Do not write to it: the memory is mapped
    read-only, but torch has no read-only tensors."""
    num_bytes = piece.box.num_elems * tensor.elem_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it is not writable
        content = torch.from_numpy(file[piece.file_offset : piece.file_offset + num_bytes])
        return content.view(dtype_named(tensor.dtype))


def _shards_of(
    content: torch.Tensor, piece: StoredPiece, *, tensor: StoredTensor
) -> list[tuple[Box, torch.Tensor]]:
    """Returns the piece as boxes of the tensor's shape of at most SHARD_BYTES, each with its part of `content`."""
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
