"""Loads one checkpoint, or the newest one that no rank finds damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.format.commit_header import UnknownFormatError
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, Regions, from_rank_0, say_rejected
from hpctrain.checkpoint.loading.node_sharing import Sharing, nodes_that_share, read_sharing
from hpctrain.comm import Collective, agreed, doing, on_rank_0
from hpctrain.errors import CheckpointError

T = TypeVar("T")

# Regions that depend on what the checkpoint holds, such as the number of ranks that saved it. Must not fail.
RegionsOf = Callable[[Checkpoint], Regions]


class DoesNotFitError(CheckpointError):
    """The checkpoint is undamaged but does not match the request, so no older one is tried."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A checkpoint that was skipped, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """tensors: by name, on the CPU, verified. rejected: the newer checkpoints that were skipped, newest first."""

    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]
    rejected: tuple[Rejected, ...]


def load_newest_good(
    directory: Path | str,
    *,
    comm: Collective,
    regions: Regions | RegionsOf | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> Restored | None:
    """Loads the newest checkpoint in which no rank finds damage in the bytes that it reads. Collective.

    A damaged checkpoint is reported on stderr, and the next older one is tried; all ranks load the same one.

    Args:
        regions: tensors of which this rank reads only a box (offset, shape), or a list of boxes, which are joined along
            the first dimension; or a function that returns them. All others are read whole.
        sharing: whether the ranks of a node each read a part and exchange the parts; the same on every rank.
        node_of_rank: the node of each rank, the same on every rank; None: determined from the host names.

    Returns None if the directory holds no checkpoint. Raises CheckpointError on every rank if it holds some but all
    are damaged (whether to start from scratch is then the user's decision), or if the newest has an unknown format.
    """

    def read(checkpoint: Checkpoint) -> Restored:
        tensors = read_together(
            checkpoint, comm=comm, regions=regions, sharing=sharing, node_of_rank=node_of_rank
        )
        return Restored(checkpoint=checkpoint, tensors=tensors, rejected=tuple(rejected))

    rejected: list[Rejected] = []
    return newest_that(read, directory=Path(directory), comm=comm, rejected=rejected)


def newest_that(
    read: Callable[[Checkpoint], T], *, directory: Path, comm: Collective, rejected: list[Rejected]
) -> T | None:
    """Returns the result of `read` for the newest checkpoint for which it raises no CheckpointError. Collective.

    read: collective, must raise on all ranks or on none. rejected: the skipped checkpoints are appended to it.
    Returns None if there is no checkpoint. Raises CheckpointError on every rank if there are some but `read` accepts
    none; UnknownFormatError and DoesNotFitError are raised at once.
    """
    with doing(comm, f"loading the newest checkpoint of {directory}"):
        for path in on_rank_0(comm, lambda: list(map(str, finished_newest_first(directory)))):
            try:
                return read(from_rank_0(comm, partial(read_structure, Path(path))))
            except (UnknownFormatError, DoesNotFitError):
                raise
            except CheckpointError as error:
                rejected.append(Rejected(path=Path(path), reason=str(error)))
                if comm.rank == 0:
                    say_rejected(str(error))
    if rejected:
        reasons = "; ".join(entry.reason for entry in rejected)
        raise CheckpointError(f"no checkpoint in {directory} can be used: {reasons}", agreed=True)
    return None


def load(
    path: Path | str,
    *,
    comm: Collective,
    regions: Regions | RegionsOf | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Loads one checkpoint, a file or a folder, without falling back to another. Collective.

    Arguments as in `load_newest_good`. Returns the checkpoint and its tensors by name, on the CPU. Raises
    CheckpointError on every rank if any rank finds damage in the bytes that it reads.
    """
    with doing(comm, f"loading checkpoint {path}"):
        checkpoint = from_rank_0(comm, lambda: read_structure(Path(path)))
        tensors = read_together(
            checkpoint, comm=comm, regions=regions, sharing=sharing, node_of_rank=node_of_rank
        )
        return checkpoint, tensors


def read_together(
    checkpoint: Checkpoint,
    *,
    comm: Collective,
    regions: Regions | RegionsOf | None = None,
    names: Sequence[str] | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads the tensors `names` (the same on every rank), or all, and returns them by name, on the CPU. Collective.

    Other arguments as in `load_newest_good`. Raises CheckpointError on all ranks if any fails.
    """
    with doing(comm, f"loading checkpoint {checkpoint.path}: reading"):
        boxes = (regions(checkpoint) if callable(regions) else regions) or {}
        nodes = nodes_that_share(checkpoint, comm=comm, sharing=sharing, node_of_rank=node_of_rank)
        if nodes is None:
            return agreed(comm, lambda: checkpoint.read_all(regions=boxes, names=names))
        wanted = list(checkpoint.tensors) if names is None else names
        return read_sharing(checkpoint, comm=comm, nodes=nodes, names=wanted, regions=boxes)
